"""algorithm.ref_update_steps: the policy becomes the reference, and a kill changes no bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import steps_in
from tests.e2e.test_resume import WORDS, Runs, differences, remains

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UPDATED = ["algorithm.ref_update_steps=3", "deterministic=true", "check_weights=true"]


@pytest.fixture(scope="module")
def inputs(digit_model: Path, digit_data: Path) -> list[str]:
    return [f"model.path={digit_model}", f"data.train={digit_data}", f"data.val={digit_data}", *WORDS, *UPDATED]


@pytest.mark.parametrize("layout", ["colocated", pytest.param("disaggregated", marks=pytest.mark.soak)])
def test_the_policy_becomes_the_reference_and_a_kill_changes_no_bit(
    tmp_path: Path, inputs: list[str], layout: str
) -> None:
    runs = Runs(tmp_path, [*inputs, f"layout={layout}"])
    whole = remains(runs.finish("undisturbed"))
    reader = RolloutReader(tmp_path / "undisturbed")
    for step in (1, 2, 3, 4, 5, 6):
        batch = reader.batch(step)
        distance = (batch.old_logprobs - batch.ref_logprobs)[batch.loss_mask].abs().max()
        # Equal weights after an update and before the first step; otherwise they differ by a step.
        assert (distance < 1e-5) == (step in (1, 4)), (step, distance)
    rows = read_metrics(tmp_path / "undisturbed")
    assert [row["step"] for row in rows if "time/reference_update" in row] == [3, 6]
    start = runs.start("killed")
    start.wait_until(lambda: start.step >= 5)
    start.kill()
    assert differences(remains(runs.finish("killed")), whole) == []


def test_old_references_are_deleted_and_a_missing_one_is_reported(tmp_path: Path, inputs: list[str]) -> None:
    words = ["algorithm.ref_update_steps=1", "save_every=1", "layout=single", "eval_every=0"]
    runs = Runs(tmp_path, [*inputs, *words, "max_steps=6"])
    folder = runs.finish("run") / "reference"
    left = steps_in(folder)
    assert left[-1] == 6 and len(left) < 5, "older than those of the checkpoints"
    shutil.rmtree(folder)
    start = Runs(tmp_path, [*runs.words, "max_steps=7"]).start("run")
    assert start.wait() == ExitCode.CHECKPOINT, start.text
    assert f"{folder}/step_000006, the reference of this checkpoint, does not exist" in start.text
