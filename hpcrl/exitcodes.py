"""How a run ends, as the exit code that a script or a scheduler sees. Explained in docs/exit_codes.md."""

from __future__ import annotations

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every hpcrl command. Codes from 128 on follow the shell: 128 + signal."""

    DONE = 0  # everything asked for was done; also: the run was finished before
    FAILED = 1  # an error that none of the others describes; its traceback is in the log
    BAD_INPUT = 2  # configuration, data, model or run folder; nothing was started
    RANK_FAILED = 10  # a rank raised an exception
    RANK_KILLED = 11  # a rank ended by a signal, or without a word
    DEADLINE = 12  # a command or the start took longer than its deadline: a hang
    STORE_LOST = 13  # the control store is gone, or messages in it were lost, reordered or taken
    STARVED = 14  # a step could not be filled with valid groups
    NO_PROGRESS = 15  # the loss or the gradients stopped being finite
    CHECKPOINT = 16  # there are checkpoints, and none could be read
    SUPERSEDED = 17  # another attempt owns the run folder
    NOT_SAVED = 18  # a checkpoint, or another file of the run, could not be written
    REQUEUE = 75  # stopped at a step boundary with everything saved; start again to go on
    INTERRUPTED = 130  # SIGINT
    TERMINATED = 143  # SIGTERM


SIGNAL_CODES: dict[int, ExitCode] = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}
"""Codes of a run that a signal ended; other signals, and the end of the job's time, ask for a requeue."""
ASKED = (ExitCode.REQUEUE, *SIGNAL_CODES.values())
"""Ends that somebody asked for: nothing went wrong."""
