"""A run resumes on other ranks than its checkpoint was written by, with exact accounting, and reports the change."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.checkpoint.state import read_state
from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import committed_step, step_name
from tests.e2e.program import Start
from tests.e2e.test_resume import WORDS, check_accounts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STAGES = [
    ["layout=colocated"],
    ["layout=single"],
    ["layout=colocated", "layout.trainer.num_ranks=4", "generator.max_num_seqs=4"],
    ["layout=disaggregated", "layout.trainer.num_ranks=1"],
]


def counters(run_dir: Path) -> dict[str, float]:
    return read_state(run_dir / "checkpoints" / step_name(committed_step(run_dir)))["counters"]


@pytest.mark.parametrize(
    ("deterministic", "stages"),
    [
        pytest.param("true", STAGES, marks=pytest.mark.soak),
        ("true", [STAGES[0], *STAGES[2:]]),
        pytest.param("false", STAGES[::3], marks=pytest.mark.soak),
    ],
)
def test_a_run_resumes_on_another_layout(
    tmp_path: Path, digit_model: Path, digit_data: Path, deterministic: str, stages: list[list[str]]
) -> None:
    inputs = [f"model.path={digit_model}", f"data.train={digit_data}", f"data.val={digit_data}"]
    run_dir, seconds = tmp_path / "run", 0.0
    for stage, words in enumerate(stages, start=1):
        more = [f"deterministic={deterministic}", f"max_steps={stage}", "save_every=1", *words]
        start = Start(run_dir, [*inputs, *WORDS, *more])
        assert start.wait() == ExitCode.DONE, start.text
        resumed = f"resumed from {step_name(stage - 1)}"
        assert (resumed in start.text) == (stage > 1), start.text
        assert ("results are not the same in every bit" in start.text) == (stage > 1), start.text
        check_accounts(run_dir)
        assert counters(run_dir)["step"] == stage and counters(run_dir)["seconds"] > seconds
        seconds = counters(run_dir)["seconds"]
    assert [row["step"] for row in read_metrics(run_dir)] == list(range(len(stages) + 1))
    assert "trainer ranks" in start.text.split("was written with ")[1]
    assert ("generator.max_num_seqs 4 (now 8)" in start.text) == (STAGES[2] in stages)
