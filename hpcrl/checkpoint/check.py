"""Verify a rank's share of a checkpoint's files against the manifest, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from hpcrl.checkpoint.commit import FileEntry, damage_of


class _Stopped(Exception):
    """The result is no longer needed."""


class FileCheck:
    """Verifies files in a thread, so an unresponsive file system blocks the thread and not the rank."""

    def __init__(self, folder: Path, entries: Sequence[FileEntry]):
        self._folder, self._entries = folder, entries
        self._reached, self._file, self._stopped = 0, "", False
        self._found: Future[str] = Future()
        threading.Thread(target=self._run, name="check", daemon=True).start()

    def result(self, wait_s: float) -> str | None:
        """The damage of the first damaged file; empty if all files are intact; None if the result is not ready after
        wait_s seconds."""
        try:
            return self._found.result(wait_s)
        except TimeoutError:
            return None

    def progress(self) -> tuple[str, int]:
        """The file being read, and the total bytes read."""
        return self._file, self._reached

    def stop(self) -> None:
        """Stop reading; result() may then stay None."""
        self._stopped = True

    def _run(self) -> None:
        try:
            self._found.set_result(self._compare())
        except BaseException as error:  # result() raises it again
            self._found.set_exception(error)

    def _compare(self) -> str:
        for entry in self._entries:
            self._file = str(self._folder / entry.path)
            if damage := damage_of(self._folder, entry, self._read):
                return damage
        return ""

    def _read(self, num_bytes: int) -> None:
        self._reached += num_bytes
        if self._stopped:
            raise _Stopped
