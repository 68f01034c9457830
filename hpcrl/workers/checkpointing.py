"""A rank's part of checkpoints: the state of all its trained engines, in one set of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from hpcrl.checkpoint.check import FileCheck
from hpcrl.checkpoint.commit import FileEntry
from hpcrl.checkpoint.writer import Files, Writer
from hpcrl.engines.train.training_engine import TrainEngine
from hpcrl.messaging.messages import AbandonSave, CheckFiles, Done, FinishCheck, FinishSave, LoadState, SaveState
from hpcrl.metrics.stats import scalar
from hpcrl.system.files import is_storage_error
from hpcrl.workers.role import Rank


class Learns(Protocol):
    """A role whose engine's state is saved."""

    engine: TrainEngine
    state_folder: str | None
    """Folder of the state within a checkpoint. If empty, the checkpoint folder itself; if None, no state is saved."""


def or_unwritten(seq: int, write: Callable[[], Done]) -> Done:
    """The result of `write`, or an answer that a full or failing file system did not take the files: the run may go on
    without this checkpoint."""
    try:
        return write()
    except OSError as error:
        if not is_storage_error(error):
            raise
        return Done(seq, unwritten=(error.errno or 0, str(error)))


class Saving:
    """Saves and loads the state of a rank's roles, in the order in which they were built. Every rank has one."""

    def __init__(self, worker: Rank):
        self._worker = worker
        self._writer = Writer()
        self._check: FileCheck | None = None

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {
            SaveState: self._save,
            FinishSave: lambda command, seq: or_unwritten(seq, lambda: self._finish_save(command, seq)),
            AbandonSave: self._abandon_save,
            CheckFiles: self._check_files,
            FinishCheck: self._finish_check,
            LoadState: self._load,
        }

    def close(self) -> None:
        """Stop writing and checking."""
        self._writer.close()
        if self._check is not None:
            self._check.stop()

    def _engines(self) -> list[tuple[str, TrainEngine]]:
        """(folder in a checkpoint, engine) for each of the rank's roles with a saved state."""
        roles = cast(list[Learns], list(self._worker.roles.values()))
        folders = ((getattr(role, "state_folder", None), role) for role in roles)
        return [(folder, role.engine) for folder, role in folders if folder is not None]

    def _save(self, command: SaveState, seq: int) -> Done:
        files: Files = {}
        for folder, engine in self._engines():
            files |= {str(Path(folder, name)): content for name, content in engine.snapshot(command.copy).items()}
        self._writer.start(Path(command.folder), files)
        return Done(seq)

    def _finish_save(self, command: FinishSave, seq: int) -> Done:
        written = self._writer.result(command.wait_s)
        if written is None:
            return Done(seq, progress=self._writer.progress())
        files = [(entry.path, entry.size, entry.sha256) for entry in written.entries]
        return Done(seq, {"time/save_write": scalar(written.seconds)}, files)

    def _abandon_save(self, command: AbandonSave, seq: int) -> Done:
        self._writer.abandon()
        return Done(seq)

    def _check_files(self, command: CheckFiles, seq: int) -> Done:
        if self._check is not None:
            self._check.stop()
        self._check = FileCheck(Path(command.folder), [FileEntry(*file) for file in command.files])
        return Done(seq)

    def _finish_check(self, command: FinishCheck, seq: int) -> Done:
        assert self._check is not None, "CheckFiles comes before"
        damage = self._check.result(command.wait_s)
        if damage is None:
            return Done(seq, progress=self._check.progress())
        return Done(seq, texts=[damage] if damage else [])

    def _load(self, command: LoadState, seq: int) -> Done:
        warnings = [text for folder, engine in self._engines() for text in engine.load(Path(command.folder, folder))]
        return Done(seq, texts=warnings)
