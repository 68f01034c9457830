"""A run whose saves fail for lack of room trains on, the same in every bit, and resumes once there is room."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import steps_in
from tests.disks import small_file_system
from tests.e2e.test_resume import NUM_STEPS, TIMED, WORDS, Runs, differences, remains

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAILED = "checkpoint/failed"


def test_failed_saves_change_no_bit(tmp_path: Path, digit_model: Path, digit_data: Path) -> None:
    """The disk has room for four checkpoints of 568 KiB: the fifth is not begun, the last one ends the run."""
    inputs = [f"model.path={digit_model}", f"data.train={digit_data}", f"data.val={digit_data}"]
    more = ["deterministic=true", "layout=single", "save_every=1", "keep_checkpoints=9", "prune_when_full=false"]
    words = [word for word in WORDS if not word.startswith("save_every=")]
    runs = Runs(tmp_path, [*inputs, *words, *more])
    (folder := tmp_path / "small").mkdir()
    with small_file_system(folder, 3):
        start = runs.start("small")
        assert start.wait() == ExitCode.NOT_SAVED, start.text
        saved = steps_in(folder / "checkpoints")
        assert 2 <= len(saved) < NUM_STEPS - 1 and f"checkpoint of step {NUM_STEPS} not written" in start.text
        assert "training goes on, and the next save is tried after the next step" in start.text
        failed = [row for row in read_metrics(folder) if row["step"] > saved[-1]]
        assert failed[-1]["step"] == NUM_STEPS and failed[-1][FAILED] == NUM_STEPS - 1 - saved[-1]
        subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
        left = remains(runs.finish("small"))
        assert differences(left, runs.undisturbed) == []
        again = {row["step"]: row for row in read_metrics(folder)}
        for row in failed:
            assert compared(row) == compared(again[row["step"]])


def compared(row: dict[str, float]) -> str:
    """What a row of metrics says, except for times and failures."""
    return json.dumps({name: value for name, value in row.items() if not name.startswith((*TIMED, FAILED))})
