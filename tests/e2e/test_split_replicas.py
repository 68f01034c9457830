"""Replicas of several ranks give the same numbers as replicas of one rank, whatever happens to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import committed_step, step_name
from tests.conftest import ROOT
from tests.e2e.program import Start
from tests.e2e.test_resume import NUM_STEPS, WORDS, check_accounts, differences, remains

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SPLIT = ["generator.engine=tests.e2e.split:SPEC", "layout.generator.tensor_parallel=2"]
APART = """
layout=disaggregated layout.trainer.num_ranks=1 layout.reference.colocate_with=trainer layout.reference.num_ranks=null
layout.reward.colocate_with=generator layout.reward.num_ranks=null
layout.env.colocate_with=generator layout.env.num_ranks=null
""".split()  # noqa: SIM905
"""Rank 1 trains, 2 (or 2 and 3) generate, score and play."""
TWO_TURNS = ["deterministic=true", "env.played.name=scripted", "env.played.add_reward=true", "check_weights=true"]
LAYOUTS: dict[str, tuple[list[str], list[str]]] = {
    "apart": ([*APART, "layout.generator.num_ranks=1"], [*APART, *SPLIT, "layout.generator.num_ranks=2"]),
    "colocated": (["layout.generator.num_ranks=1"], SPLIT),
}
"""Words for one replica of one rank, and for one of two."""


class Runs:
    """Starts in a folder."""

    def __init__(self, folder: Path, model: Path, train: str, val: Path):
        self.folder, self._words = folder, [f"model.path={model}", f"data.train={train}", f"data.val={val}", *WORDS]

    def start(self, name: str, more: list[str], dies: str = "") -> tuple[int, str]:
        """One start of a run to its end: exit code and what it printed."""
        environment = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/e2e/dies", "HPCRL_TEST_DIES": dies}
        start = Start(self.folder / name, [*self._words, *more], environment)
        return start.wait(200.0), start.text


@pytest.fixture
def runs(tmp_path: Path, digit_model: Path, digit_data: Path) -> Runs:
    train = f"[{{path:{digit_data},domain:played}},{{path:{digit_data},domain:plain}}]"
    return Runs(tmp_path, digit_model, train, digit_data)


@pytest.mark.parametrize("layout", ["apart", pytest.param("colocated", marks=pytest.mark.soak)])
def test_split_and_unsplit_replicas_give_the_same_numbers(runs: Runs, layout: str) -> None:
    """Prompts with and without environments, evaluation and saves; a rank after the first is killed on the way."""
    whole, split = LAYOUTS[layout]
    code, text = runs.start("whole", [*whole, *TWO_TURNS])
    assert code == ExitCode.DONE, text
    other = 3 if layout == "apart" else 2
    code, text = runs.start("split", [*split, *TWO_TURNS], f"{other}:DecodeChunk:60:SIGKILL")
    assert (
        code == ExitCode.RANK_KILLED and f"hpcrl: rank {other} (" in text and "killed by SIGKILL in DecodeChunk" in text
    )
    assert 0 < committed_step(runs.folder / "split") < NUM_STEPS, text
    code, text = runs.start("split", [*split, *TWO_TURNS])
    assert code == ExitCode.DONE, text
    left = {name: remains(runs.folder / name) for name in ("whole", "split")}
    assert differences(left["split"], left["whole"]) == []


def test_the_state_of_split_replicas_is_restored_at_a_resume(runs: Runs) -> None:
    """Two replicas of two ranks generate ahead; the second rank of one is killed after some of their work was saved."""
    words = [
        *LAYOUTS["apart"][1],
        "layout.generator.num_ranks=4",
        "rollout.max_staleness=1",
        "env.played.name=scripted",
    ]
    words.append("save_every=1")  # a save begins when the one before is committed, so that some are by the fifth update
    code, text = runs.start("run", words, "3:UpdateWeights:5:SIGKILL")
    assert code == ExitCode.RANK_KILLED, text
    saved = committed_step(runs.folder / "run")
    assert 0 < saved < NUM_STEPS, text
    held = sorted(path.name for path in (runs.folder / "run" / "checkpoints" / step_name(saved)).glob("pending*"))
    assert held and set(held) <= {"pending_rank0002.safetensors", "pending_rank0004.safetensors"}
    code, text = runs.start("run", words)
    assert code == ExitCode.DONE and f"resumed from {step_name(saved)}" in text, text
    assert [row["step"] for row in read_metrics(runs.folder / "run")] == list(range(NUM_STEPS + 1))
    check_accounts(runs.folder / "run")
