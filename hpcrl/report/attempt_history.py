"""When each attempt of a run began, computed and ended, what ended it, and which steps were lost: from its records and
the first and last lines of its logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from weakref import WeakKeyDictionary

from hpcrl.report.run_files import RunAttempt, RunFiles
from hpcrl.run_folder import log_folder
from hpcrl.system.exit_codes import ASKED, ExitCode
from hpcrl.system.log import HEADER

STEP = re.compile(r"step (\d+)/\d+\b")
RESUMED = re.compile(r"(?:resumed|branch) from step_(\d{6,})")
STOPPED = re.compile(r"stopped by (SIG[A-Z0-9]+)\b.*")
TAKEN = re.compile(r"CANCELLED AT \S+ DUE TO ([A-Z -]+)")
"""Slurm's line in a job's log, such as `*** STEP 50.0 ON n1 CANCELLED AT 2026-11-28T19:00:01 DUE TO TIME LIMIT ***`."""
HEAD_BYTES, TAIL_BYTES = 8 << 20, 1 << 18
"""How much of a log is searched for the first step, and for the last messages."""


@dataclass(frozen=True)
class AttemptHistory:
    """What happened to one attempt. Times are seconds since the epoch, None if unknown.

    Args:
        resumed_from: Step of the checkpoint from which it resumed; 0 for a fresh start; None if unknown.
        first_step_at: When its first training step was complete.
        last_step: Its last complete step, 0 without one; None if unknown.
        lost_steps: Steps that it completed, and that the next attempt moved away to compute them again.
        end: A word or two: running, finished, preempted, time limit, node failed, requeued, cancelled, signal, failed,
            lost, ended.
        why: The same in a sentence.
        restart_s: Seconds from the end of the previous attempt to the first complete step of this one.
        waited_s: The part of restart_s before this attempt began, as in Slurm's queue.
    """

    number: int
    began: float | None
    first_step_at: float | None
    ended: float | None
    resumed_from: int | None
    last_step: int | None
    lost_steps: tuple[int, ...]
    end: str
    why: str
    restart_s: float | None = None
    waited_s: float | None = None


_known: WeakKeyDictionary[RunFiles, list[AttemptHistory]] = WeakKeyDictionary()
"""The sections of a page ask for the same histories, for which the logs of all attempts are read."""


def histories(run: RunFiles) -> list[AttemptHistory]:
    """One history for each attempt, in order; read once for each RunFiles."""
    if run not in _known:
        attempts = run.attempts
        found = [_history(run, attempt, attempt is attempts[-1]) for attempt in attempts]
        _known[run] = found[:1] + [_after(before, this) for before, this in pairwise(found)]
    return _known[run]


def begin_of(attempt: RunAttempt) -> float | None:
    """When an attempt began, seconds since the epoch; None if its records do not say."""
    return _seconds(attempt.owner.get("since")) or _seconds(attempt.facts.get("start"))


def end_of(run: RunFiles, attempt: RunAttempt) -> float | None:
    """When an attempt that is over ended: by its record, else its last message; None if neither is known."""
    return _seconds(attempt.owner.get("ended")) or _last_time(_tails(run, attempt))


def _tails(run: RunFiles, attempt: RunAttempt) -> list[list[str]]:
    """The last lines of rank 0 and of its agent."""
    folder = log_folder(Path(), attempt.number)
    return [run.tail(f"{folder}/{name}.log", TAIL_BYTES).splitlines() for name in ("rank_0000", "agent_0000")]


def _last_time(tails: Sequence[Sequence[str]]) -> float | None:
    times = [at for lines in tails if (at := next(filter(None, map(_time_of, reversed(lines))), None)) is not None]
    return max(times, default=None)


def _history(run: RunFiles, attempt: RunAttempt, newest: bool) -> AttemptHistory:
    head = run.text(f"{log_folder(Path(), attempt.number)}/rank_0000.log", HEAD_BYTES).splitlines()
    tails = _tails(run, attempt)
    resumed = next((int(found[1]) for line in head if (found := RESUMED.search(line))), None)
    if resumed is None and (attempt.facts.get("kind") == "fresh" or attempt.number == 1):
        resumed = 0
    steps = [(int(found[1]), line) for line in head if (found := STEP.search(line)) and HEADER.match(line)]
    first = next((line for step, line in steps if step > (resumed or 0)), "")
    last = [int(found[1]) for line in tails[0] if (found := STEP.search(line)) and HEADER.match(line)]
    end, why = _end(run, attempt, newest, [line for lines in tails for line in lines])
    return AttemptHistory(
        attempt.number,
        began=begin_of(attempt),
        first_step_at=_time_of(first),
        ended=None if end == "running" else _seconds(attempt.owner.get("ended")) or _last_time(tails),
        resumed_from=resumed,
        last_step=max(last, default=resumed) if head else None,
        lost_steps=_lost(run, attempt.number + 1),
        end=end,
        why=why,
    )


def _after(before: AttemptHistory, this: AttemptHistory) -> AttemptHistory:
    """The history with the times since the previous attempt."""
    values = dict(vars(this))
    if before.ended is not None:
        values["restart_s"] = None if this.first_step_at is None else max(this.first_step_at - before.ended, 0.0)
        values["waited_s"] = None if this.began is None else max(this.began - before.ended, 0.0)
    return AttemptHistory(**values)


def _lost(run: RunFiles, taker: int) -> tuple[int, ...]:
    """Steps that attempt `taker` moved to abandoned/."""
    rows = run.lines(f"abandoned/{taker}/metrics.jsonl")
    return tuple(sorted({row["step"] for row in rows if isinstance(row.get("step"), int) and row["step"] > 0}))


def _end(run: RunFiles, attempt: RunAttempt, newest: bool, lines: list[str]) -> tuple[str, str]:
    owner, code = attempt.owner, attempt.outcome.get("code")
    how, why = str(owner.get("how", "")), str(owner.get("why", ""))
    verdict = str(attempt.verdict.get("message", "")) if attempt.verdict.get("code") not in ASKED else ""
    stopped = next((found[0] for line in reversed(lines) if (found := STOPPED.search(line))), "")
    because = "; ".join(text for text in (verdict or stopped, why) if text)
    if newest and run.finished:
        return "finished", str(run.finished.get("reason", ""))
    if newest and "ended" not in owner and run.state.split(":")[0] in ("running", "ending", "starting"):
        return "running", run.state
    by, taken = owner.get("by"), _taken(run, attempt)
    if "NODE FAIL" in taken:
        return "node failed", because or "Slurm lost a node of the job"
    if by == "preempted" or "PREEMPT" in taken:
        return "preempted", because or "Slurm gave its nodes to another job"
    if by == "time" or "TIME LIMIT" in taken or (how == "requeue" and _at_limit(run, attempt)):
        return "time limit", because or "the job's time limit"
    if by == "cancelled" or "cancelled" in why:
        return "cancelled", because
    if by == "nodes":
        return "requeued", because or "Slurm requeued the job"
    if verdict:
        return "failed", because
    if stopped or code in ASKED or how in [asked.name.lower() for asked in ASKED]:
        return "signal", because or "stopped by a signal, with everything saved"
    if how and how not in ("lost", "not_started", "done"):
        return "failed", f"{how}; {because}" if because else how
    if isinstance(code, int) and code:
        return "failed", f"exit code {code} ({_code_name(code)})"
    if "ended" in owner and how != "lost":
        return "ended", because
    return "lost", because or "no report: it was killed, or its node failed"


def _taken(run: RunFiles, attempt: RunAttempt) -> str:
    """Slurm's reason for cancelling the attempt's job step; empty if the job's log has none."""
    job, restarts = attempt.owner.get("job"), attempt.owner.get("restarts")
    if not isinstance(job, int):
        return ""
    text = run.tail(f"slurm/job-{job}.log", 16 * TAIL_BYTES)
    mine = text.rpartition(f"attempt {attempt.number} in job {job}, restart {restarts}")[2]
    mine = mine.partition(f"attempt {attempt.number + 1} in job {job}, restart ")[0]
    found = TAKEN.search(mine)
    return found[1] if found else ""


def _at_limit(run: RunFiles, attempt: RunAttempt) -> bool:
    """Whether the attempt ended in the last part of its job's time limit, in which Slurm sends its signal."""
    began, ended = _seconds(attempt.owner.get("since")), _seconds(attempt.owner.get("ended"))
    config = run.checked
    if config is None or began is None or ended is None:
        return False
    return ended - began > config.cluster.time_s - config.cluster.signal_lead_s - 120.0


def _code_name(code: int) -> str:
    return ExitCode(code).name if code in list(ExitCode) else "unknown"


def _time_of(line: str) -> float | None:
    found = HEADER.match(line)
    return _seconds(found["time"]) if found else None


def _seconds(text: object) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except (ValueError, OverflowError):  # OverflowError: a year that no timestamp has
        return None
