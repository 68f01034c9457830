"""Saves that fail: training goes on and the next save is tried after the next step, until too many in a row failed."""

from __future__ import annotations

import errno
import logging

from hpcrl.checkpoint.room import NoRoomError
from hpcrl.controller.long_commands import Stalled
from hpcrl.system.files import is_storage_error

logger = logging.getLogger(__name__)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class FailedSaves:
    """Counts saves that fail in a row. `was_refused` is whether the last one was begun and found no room."""

    def __init__(self, allowed: int):
        """`allowed` is how many in a row may fail before the run ends (max_failed_saves)."""
        self._allowed, self._worst = allowed, 0
        self.in_row, self.was_refused = 0, False

    def add(self, error: Exception) -> None:
        """Count a failure, which is `error`, with its cause; raises it if the run must end: too many have failed, or
        the cause is neither storage that is full or fails nor a rank whose writing does not advance."""
        cause = error.__cause__
        if not isinstance(cause, Stalled) and (cause is None or not is_storage_error(cause)):
            raise error
        self.in_row += 1
        self._worst = max(self._worst, self.in_row)
        begun = not isinstance(cause, NoRoomError)
        self.was_refused = begun and isinstance(cause, OSError) and cause.errno in NO_ROOM
        if self.in_row > self._allowed:
            raise error
        logger.warning(
            "%s; training goes on, and the next save is tried after the next step (failed save %d in a row, of at most "
            "%d: max_failed_saves)",
            *(error, self.in_row, self._allowed),
        )

    def end(self) -> None:
        """A checkpoint exists again."""
        if self.in_row:
            logger.info("saved again, after %d failed saves in a row", self.in_row)
        self.in_row, self.was_refused = 0, False

    def take_worst(self) -> int:
        """The most failures in a row since the last call, those before it included if there was no save since."""
        worst, self._worst = self._worst, self.in_row
        return worst
