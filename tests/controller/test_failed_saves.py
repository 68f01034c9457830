"""Saves that fail between steps: training goes on, older checkpoints stay, and the next save is tried again."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.checkpoint import commit
from hpcrl.checkpoint.commit import find_latest
from hpcrl.checkpoint.writer import Writer
from hpcrl.controller.checkpoints import Checkpoints, NotSavedError
from hpcrl.messaging.messages import Command, Done, FinishSave, SavePending
from hpcrl.system.files import steps_in
from tests.children import children
from tests.controller.test_best_step import KEPT, METRIC, best_of
from tests.controller.test_saves import Ranks, last_writer, make, sample_of
from tests.controller.test_saves import ranks as ranks  # noqa: PLC0414  # a fixture
from tests.disks import small_file_system

pytestmark = [pytest.mark.usefixtures("console"), pytest.mark.timeout(120)]

MIB = 1 << 20


class RefusingRanks(Ranks):
    """Rank 2 and the generator are refused as long as `number` is an error number."""

    number = 0

    def _answer(self, writer: Writer | None, rank: int, command: Command) -> Done:
        refused = isinstance(command, FinishSave) and rank == 2
        if self.number and (refused or isinstance(command, SavePending)):
            if writer is not None:
                super()._answer(writer, rank, FinishSave(30.0))
            return Done(0, unwritten=(self.number, f"shard_{rank} cannot be written: {os.strerror(self.number)}"))
        return super()._answer(writer, rank, command)


@pytest.fixture
def refusing() -> Iterator[RefusingRanks]:
    made = RefusingRanks()
    yield made
    for writer in made.writers.values():
        writer.close()


def seen_ahead(checkpoints: Checkpoints) -> None:
    """Return when what follows a commit in its thread is done."""
    checkpoints._thread.submit(int).result(30)


def steps(checkpoints: Checkpoints, first: int, last: int) -> None:
    for step in range(first, last + 1):
        checkpoints.maybe_save(step)
        checkpoints._advance(step, wait=True)
        seen_ahead(checkpoints)


def unfinished(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if ".tmp-" in path.name)


def test_a_refused_save_is_tried_again_after_the_next_step(
    tmp_path: Path, refusing: RefusingRanks, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, root = make(tmp_path, refusing, save_every=4), tmp_path / "checkpoints"
    steps(checkpoints, 1, 4)
    refusing.number = errno.EDQUOT
    steps(checkpoints, 5, 9)
    assert steps_in(root) == [4] and unfinished(root) == []
    assert checkpoints.take_stats()["checkpoint/failed"].total == 2
    assert not refusing.writers[1].busy, "what the other rank wrote is given up"
    refusing.number = 0
    assert checkpoints.take_stats()["checkpoint/failed"].total == 2, "there is no checkpoint yet"
    steps(checkpoints, 10, 12)
    assert steps_in(root) == [10, 12], "10 was the next step, 12 is due"
    checkpoints.take_stats()
    assert "checkpoint/failed" not in checkpoints.take_stats()
    said = capsys.readouterr().out
    failure = f"hpcrl: checkpoint of step 8 not written to {root}: rank 2 (trainer): shard_2 cannot be written: "
    assert f"{failure}Disk quota exceeded; training goes on" in said
    assert "failed save 2 in a row, of at most 10: max_failed_saves" in said
    assert "saved again, after 2 failed saves in a row" in said


def test_the_bound_ends_the_run(tmp_path: Path, refusing: RefusingRanks) -> None:
    checkpoints, root = make(tmp_path, refusing, max_failed_saves=2), tmp_path / "checkpoints"
    steps(checkpoints, 1, 2)
    refusing.number = errno.EIO
    steps(checkpoints, 3, 5)
    with pytest.raises(NotSavedError, match=r"checkpoint of step 6 not written .*Input/output error"):
        steps(checkpoints, 6, 6)
    assert steps_in(root) == [2]


def test_without_allowed_failures_the_first_ends_the_run(tmp_path: Path, refusing: RefusingRanks) -> None:
    checkpoints = make(tmp_path, refusing, max_failed_saves=0)
    refusing.number = errno.ENOSPC
    with pytest.raises(NotSavedError, match=r"checkpoint of step 2 not written .*No space left on device"):
        steps(checkpoints, 1, 2)


def test_the_last_save_must_succeed(tmp_path: Path, refusing: RefusingRanks) -> None:
    checkpoints, root = make(tmp_path, refusing), tmp_path / "checkpoints"
    steps(checkpoints, 1, 2)
    refusing.number = errno.ENOSPC
    with pytest.raises(NotSavedError, match=r"checkpoint of step 3"):
        checkpoints.save_within(3, 3600.0)
    checkpoints.discard()
    assert steps_in(root) == [2] and unfinished(root) == []


def test_a_failed_save_does_not_prevent_the_last_one(tmp_path: Path, refusing: RefusingRanks) -> None:
    checkpoints, root = make(tmp_path, refusing), tmp_path / "checkpoints"
    refusing.number = errno.ENOSPC
    checkpoints.maybe_save(2)
    checkpoints.commit_if_written()
    assert checkpoints._snapshot is None, "noticed within the step"
    refusing.number = 0
    checkpoints.maybe_save(4)
    refusing.number, asked = errno.ENOSPC, refusing._answer

    def recover(writer: Writer | None, rank: int, command: Command) -> Done:
        answer = asked(writer, rank, command)
        refusing.number *= answer.unwritten is None
        return answer

    refusing._answer = recover  # type: ignore[method-assign]
    checkpoints.save(5)
    assert steps_in(root) == [5]


def test_held_samples_that_are_refused_fail_the_save_only(tmp_path: Path, refusing: RefusingRanks) -> None:
    checkpoints, root = make(tmp_path, refusing), tmp_path / "checkpoints"
    refusing.waiting, refusing.number = [sample_of(1, 2)], errno.ENOSPC
    checkpoints.maybe_save(2)
    assert unfinished(root) == [] and checkpoints.take_stats()["checkpoint/failed"].total == 1
    refusing.number = 0
    steps(checkpoints, 3, 3)
    assert steps_in(root) == [3]


@pytest.mark.slow
def test_a_stalled_writer_is_given_up(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints, root = make(tmp_path, ranks), tmp_path / "checkpoints"
    steps(checkpoints, 1, 2)
    stopped = last_writer()
    stopped.suspend()
    checkpoints.maybe_save(4)
    ranks.command_s = 2.0
    checkpoints.maybe_save(6)
    ranks.command_s = 60.0
    steps(checkpoints, 7, 7)
    assert steps_in(root) == [2, 6] and unfinished(root) == []
    assert stopped.pid not in [process.pid for process in children("hpcrl.checkpoint.writer")]


def test_a_failed_best_is_not_the_best(tmp_path: Path, refusing: RefusingRanks) -> None:
    """The earlier best checkpoint stays, and the next evaluation is compared with it."""
    checkpoints, root = make(tmp_path, refusing, **KEPT, save_every=0), tmp_path / "checkpoints"
    checkpoints.restore()
    values: dict[int, float] = {1: 0.3, 3: 0.9, 5: 0.2, 6: 0.5}
    evaluate(checkpoints, tmp_path, values, 1, 2)
    refusing.number = errno.ENOSPC
    evaluate(checkpoints, tmp_path, values, 3, 3)
    refusing.number = 0
    assert steps_in(root) == [1] and best_of(tmp_path) == (1, 0.3)
    evaluate(checkpoints, tmp_path, values, 4, 5)
    assert steps_in(root) == [1, 4] and best_of(tmp_path) == (1, 0.3)
    evaluate(checkpoints, tmp_path, values, 6, 6)
    assert best_of(tmp_path) == (6, 0.5)


def evaluate(checkpoints: Checkpoints, run: Path, values: dict[int, float], first: int, last: int) -> None:
    """The steps of a run with these values of the metric."""
    for step in range(first, last + 1):
        metrics: dict[str, Any] = {METRIC: values[step]} if step in values else {}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        checkpoints.best.judge(step, metrics, evaluated=step in values)
        steps(checkpoints, step, step)


def test_a_checkpoint_whose_name_is_not_in_latest_counts(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, root = make(tmp_path, ranks), tmp_path / "checkpoints"

    def full(root: Path, step: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root / "LATEST"))

    with monkeypatch.context() as patch:
        patch.setattr(commit, "set_latest", full)
        steps(checkpoints, 1, 3)
    assert steps_in(root) == [2] and checkpoints.take_stats().get("checkpoint/failed") is None
    assert "the checkpoint of step 2 exists, but not all of its commit succeeded" in capsys.readouterr().out
    steps(checkpoints, 4, 4)
    assert steps_in(root) == [2, 4] and find_latest(root).problems == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Room for two checkpoints of 2 MiB, but not for three."""
    with small_file_system(tmp_path, 5) as small:
        yield small


def on(disk: Path, ranks: Ranks, **values: Any) -> Checkpoints:
    ranks.weights = os.urandom(MIB)
    return make(disk, ranks, save_every=1, **values)


def test_the_oldest_checkpoint_makes_room_on_a_real_disk(
    disk: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, root = on(disk, ranks), disk / "checkpoints"
    steps(checkpoints, 1, 4)
    assert steps_in(root) == [3, 4] and checkpoints.take_stats().get("checkpoint/failed") is None
    said = capsys.readouterr().out
    assert "checkpoint of step 1 deleted to make room (prune_when_full): the next checkpoint needs about 2.0" in said
    assert make(disk, ranks).restore() == 4


def test_kept_checkpoints_are_not_deleted_on_a_real_disk(
    disk: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    """The negative control; and what a resume finds after saves have failed."""
    checkpoints, root = on(disk, ranks, prune_when_full=False), disk / "checkpoints"
    for ranks.cursor, step in ((10, 1), (20, 2), (30, 3), (40, 4)):
        steps(checkpoints, step, step)
    assert steps_in(root) == [1, 2] and unfinished(root) == []
    assert checkpoints.take_stats()["checkpoint/failed"].total == 2
    said = capsys.readouterr().out
    assert said.count("or set prune_when_full=true, which deletes the oldest checkpoints") == 1
    for step in (3, 4):
        assert f"checkpoint of step {step} not written to {root}: the next checkpoint needs about 2.0" in said
    assert said.count("but the file system leaves 0.9") == 3, "foreseen once, and twice not begun"
    assert said.count("; remove files or ask for more; training goes on") == 2
    again = make(disk, ranks, save_every=1)
    assert again.restore() == 2 and ranks.cursor == 20
    seen_ahead(again)
    steps(again, 3, 3)
    assert steps_in(root) == [2, 3]


def test_partial_files_on_a_real_disk_are_removed(disk: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    """The first save, whose size nobody knows yet; a stop is not put off, even if it cannot fit."""
    checkpoints, root = on(disk, ranks), disk / "checkpoints"
    ranks.weights = bytes(3 * MIB)
    steps(checkpoints, 1, 2)
    assert steps_in(root) == [] and unfinished(root) == [] and checkpoints.take_stats()["checkpoint/failed"].total == 2
    assert "cannot be written: No space left on device; training goes on" in capsys.readouterr().out
    ranks.weights = bytes(MIB)
    steps(checkpoints, 3, 3)
    (disk / "filler").write_bytes(bytes(2 * MIB))
    with pytest.raises(NotSavedError, match=r"step 4 .*shard_\d cannot be written: No space left on device"):
        checkpoints.save(4)
    assert steps_in(root) == [3]


def test_the_only_checkpoint_is_never_deleted(disk: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints, root = on(disk, ranks), disk / "checkpoints"
    steps(checkpoints, 1, 1)
    (disk / "filler").write_bytes(bytes(2 * MIB))
    steps(checkpoints, 2, 3)
    assert steps_in(root) == [1] and unfinished(root) == []
    assert "remove files or ask for more\n" in capsys.readouterr().out
    (disk / "filler").unlink()
    steps(checkpoints, 4, 4)
    assert steps_in(root) == [1, 4]
