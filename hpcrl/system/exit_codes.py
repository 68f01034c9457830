"""Exit codes of a run, for scripts and schedulers. Explained in docs/exit_codes.md."""

from __future__ import annotations

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every hpcrl command. Codes from 128 on follow the shell: 128 + signal."""

    DONE = 0  # everything requested was done, now or earlier
    FAILED = 1  # an error without a code of its own; its traceback is in the log
    BAD_INPUT = 2  # configuration, data, model or run folder; nothing was started
    RANK_FAILED = 10  # a rank raised an exception
    RANK_KILLED = 11  # a rank ended by a signal, or without a report
    DEADLINE = 12  # a command or the start took longer than its deadline: a hang
    STORE_LOST = 13  # the control store is gone, or control messages were lost or reordered
    STARVED = 14  # a step could not be filled with valid groups
    NO_PROGRESS = 15  # several steps in a row trained nothing: values not finite, or all responses masked
    CHECKPOINT = 16  # checkpoints exist, but none is readable
    SUPERSEDED = 17  # another attempt owns the run folder
    NOT_SAVED = 18  # a checkpoint, or another file of the run, could not be written
    MISMATCH = 19  # trainer and generator differ by more than trainer.max_mismatch
    REQUEUE = 75  # stopped at a step boundary with everything saved; start again to resume
    INTERRUPTED = 130  # SIGINT
    TERMINATED = 143  # SIGTERM


SIGNAL_CODES: dict[int, ExitCode] = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}
"""Codes of a run ended by a signal; other signals, and the end of the job's time, lead to a requeue."""
ASKED = (ExitCode.REQUEUE, *SIGNAL_CODES.values())
"""Requested ends, which are not errors."""
