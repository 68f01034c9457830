"""ReMax as whole runs: greedy baselines are scored and not trained on, and a kill changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.rollout.types import is_greedy
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_resume import WORDS, Runs, check_accounts, differences, remains

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REMAX = [
    *(word for word in WORDS if "kl_loss_coef" not in word),
    *("algorithm=remax", "rollout.filter_std=false"),
    *("env.default.name=scripted", "env.default.add_reward=true"),
]


@pytest.fixture(scope="module")
def inputs(digit_model: Path, digit_data: Path) -> list[str]:
    return [f"model.path={digit_model}", f"data.train={digit_data}", f"data.val={digit_data}", *REMAX]


def check_rows(run_dir: Path, group_size: int) -> None:
    """Every group has one baseline, only its sampled responses, and advantages that are the differences."""
    reader = RolloutReader(run_dir)
    baselines = set()
    for step in reader.steps():
        batch = reader.batch(step)
        assert not any(map(is_greedy, batch.sample_ids.tolist()))
        for uid in batch.group_ids.unique().tolist():
            rows = batch.group_ids == uid
            assert int(rows.sum()) == group_size and len(batch.baselines[rows].unique()) == 1
        baselines |= set(batch.baselines.tolist())
        differences = (batch.rewards - batch.baselines)[batch.row_ids]
        assert batch.advantages[batch.loss_mask].tolist() == differences[batch.loss_mask].tolist()
    assert len(baselines) > 1, "prompts differ"


@pytest.mark.soak
def test_a_kill_changes_no_bit(tmp_path: Path, inputs: list[str]) -> None:
    runs = Runs(tmp_path, [*inputs, "deterministic=true"])
    whole = remains(runs.finish("undisturbed"))
    check_rows(tmp_path / "undisturbed", 4)
    rows = read_metrics(tmp_path / "undisturbed")[1:]
    assert all(row["system/samples"] == rows[0]["system/samples"] and "critic/baseline/mean" in row for row in rows)
    start = runs.start("killed")
    start.wait_until(lambda: start.step > 2)
    start.kill()
    assert differences(remains(runs.finish("killed")), whole) == []


def test_greedy_baselines_work_with_staleness_spare_members_and_restarts(tmp_path: Path, inputs: list[str]) -> None:
    ahead = [
        "layout=disaggregated",
        "rollout.max_staleness=1",
        "rollout.extra_members=1",
        "rollout.on_new_weights=restart",
    ]
    start = Start(tmp_path / "run", [*inputs, *ahead, "max_steps=4"])
    assert start.wait() == ExitCode.DONE, start.text
    check_rows(tmp_path / "run", 4)
    check_accounts(tmp_path / "run")
