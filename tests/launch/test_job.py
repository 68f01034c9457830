"""What the batch script reads of `hpcrl.launch.job begin`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.exitcodes import ExitCode
from hpcrl.launch.job import begin, main


def test_what_a_library_prints_does_not_reach_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    # Making a row of this task prints a dot.
    assert begin(["data.train=reasoning_gym:bf", f"run_dir={run_dir}"]) == ExitCode.DONE
    shown = capsys.readouterr()
    assert (shown.out, set(shown.err)) == (f"1 0 {run_dir}\n", {"."})


def test_a_job_with_other_nodes_than_the_layout_opens_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert main(["begin", f"run_dir={tmp_path / 'run'}"]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err.startswith("the job has 2 nodes, the layout needs 1; submit with")
    assert not (tmp_path / "run").exists()
