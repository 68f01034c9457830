"""A full disk: the file is named, nothing half-written stays, the run's exit code is kept."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import pytest

from hpcrl import run
from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.controller.main import _explain, _tell
from hpcrl.messaging.dispatcher import RankFailed
from hpcrl.messaging.messages import Failed
from hpcrl.metrics.log import MetricsLog
from hpcrl.node.agent import Verdict
from hpcrl.rollout.store import write_outcomes
from hpcrl.system import log
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import new_folder, write_durably
from hpcrl.workers.rank_loop import _kind

FULL = Path("/dev/full")
"""A device that takes nothing: every write fails as on a full disk."""


def test_a_durable_file_is_named_and_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text("before")
    (tmp_path / ".facts.json.tmp").symlink_to(FULL)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_durably(path, b"after")
    assert [entry.name for entry in tmp_path.iterdir()] == ["facts.json"] and path.read_text() == "before"


def test_rollouts_that_do_not_fit_are_named_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "step_000001"
    folder.mkdir()
    (folder / ".outcomes.h5.tmp").symlink_to(FULL)
    with pytest.raises(OSError, match=f"No space left on device: '{folder}/outcomes.h5'"):
        write_outcomes(folder, [])
    assert list(folder.iterdir()) == []
    with h5py.File(write_outcomes(folder, [])) as file:
        assert file.attrs["num_prompts"] == 0


def test_a_metrics_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(FULL)
    log = MetricsLog(tmp_path, resume_step=-1, max_steps=5)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/metrics.jsonl'"):
        log.log(0, {"a": 1.0})


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with new_folder(tmp_path / "hf") as folder:
            (folder / "a").write_text(text)
            assert not (tmp_path / "hf/a").exists() or (tmp_path / "hf/a").read_text() == "first"
    with pytest.raises(OSError, match="No space left"), new_folder(tmp_path / "hf") as folder:
        (folder / "a").write_text("third")
        FULL.write_bytes(b"x")
    assert [path.name for path in tmp_path.rglob("*")] == ["hf", "a"] and (tmp_path / "hf/a").read_text() == "second"


def test_a_full_log_does_not_end_a_process() -> None:
    code = """
import sys
from hpcrl.system.files import shield_output
shield_output()
for _ in range(3):
    print("x" * 100_000, file=sys.stderr, flush=True)
print("to the end", flush=True)
sys.stderr.flush()
"""
    with open(FULL, "w") as log:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "to the end\n")


def test_any_storage_failure_ends_as_not_saved() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/run/rollouts/step_000001/rank_00000.h5")
    failed = Failed(7, "WriteRollouts", str(full), _kind(full))
    for error in (full, RankFailed(f"rank 1 (trainer) failed in command WriteRollouts #7: {full}", failed)):
        code, message = _explain(error, built=True)
        assert code is ExitCode.NOT_SAVED and "'/run/rollouts/step_000001/rank_00000.h5'" in message
    assert _explain(FileNotFoundError(errno.ENOENT, "No such file", "x"), built=True)[0] is ExitCode.FAILED


def test_an_unwritable_verdict_still_reaches_the_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 prints it, and its agent uses the exit code, even after an earlier signal."""
    world = tmp_path / "world/attempt_0001"
    world.mkdir(parents=True)
    (world / ".verdict.json.tmp").symlink_to(FULL)
    place = SimpleNamespace(place=SimpleNamespace(launcher="agent"), folder=world)
    code = _tell(place, ExitCode.NOT_SAVED, "checkpoint of step 3 not written")
    assert capsys.readouterr().out == "hpcrl: checkpoint of step 3 not written\n"
    log.start("agent", console="stderr")
    layout = RoleLayout.from_config(Config())
    verdict = Verdict(code, lost={0: "process 1 exited with code 18"}, signal_number=15)
    assert run._conclude(verdict, layout, tmp_path, 1) == ExitCode.NOT_SAVED
    said = capsys.readouterr().err
    assert said.startswith("hpcrl: rank 0 ended with code 18 (NOT_SAVED); ") and "verdict.json" in said
    # Negative controls: only a signal, and an existing verdict.
    verdict = Verdict(-15, lost={0: "process 1 was killed by SIGTERM"}, signal_number=15)
    assert run._conclude(verdict, layout, tmp_path, 1) == ExitCode.TERMINATED
    _tell(place, ExitCode.NO_PROGRESS, "no progress")
    assert json.loads((world / "verdict.json").read_text()) == {"code": 15, "message": "no progress"}
    assert run._conclude(Verdict(15, lost={0: "x"}), layout, tmp_path, 1) == ExitCode.NO_PROGRESS
