"""A run that is branched from an earlier step with another rate, killed and repeated, as a user would do it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.run_folder import branches_of, stored_config
from hpcrl.run_folder.records import read_attempts
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import steps_in
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WORDS = ["pipeline=sft", "layout=single", "max_steps=4", "sft.batch_size=2", "data.train=task:sort_digits"]
WORDS += ["eval_every=0", "save_every=1", "keep_checkpoints=9", "deterministic=true"]


def rates(run: Path) -> list[float]:
    return [row["actor/lr"] for row in read_metrics(run)]


def losses(run: Path) -> list[float]:
    return [row["sft/loss"] for row in read_metrics(run)]


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("deepspeed", marks=pytest.mark.soak)])
def test_a_branch_trains_on_with_the_new_rate(engine: str, tmp_path: Path) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    run, words = tmp_path / "run", [*WORDS, f"trainer.engine={engine}"]
    first = Start(run, [*words, "trainer.lr=1e-2"])
    assert first.wait() == ExitCode.DONE, first.text
    before = losses(run)
    branch = [*words, "trainer.lr=1e-3", "resume_from=2"]
    killed = Start(run, branch, {"HPCRL_FAILPOINT": "manifest_written"})  # in step 3, after the branch has begun
    assert killed.wait() == ExitCode.RANK_KILLED, killed.text
    assert "branch from step_000002" in killed.text and steps_in(run / "checkpoints") == [1, 2]
    assert stored_config(run).resume_from is None
    again = Start(run, branch)
    assert again.wait() == ExitCode.DONE, again.text
    assert "goes on with the branch from step 2 of attempt 2" in again.text and "resumed from step_000002" in again.text
    assert rates(run) == [1e-2, 1e-2, 1e-3, 1e-3] and len(branches_of(read_attempts(run))) == 1
    after = losses(run)
    # Step 3's loss is computed before its update, so the new rate shows in step 4's.
    assert after[:3] == before[:3] and after[3] != before[3]
    assert steps_in(run / "abandoned/2/checkpoints") == [3, 4]
