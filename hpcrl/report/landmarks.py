"""What an overview names besides the attempts: the best checkpoint, branches, an evaluation's scores, reports of hangs
and profiles, with their places in the run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from hpcrl.checkpoint.best import BEST, Best
from hpcrl.metrics.evaluated import COLUMNS, SUMMARY, scores_in_short, table_rows
from hpcrl.metrics.metric_table import MetricTable
from hpcrl.report.attempt_history import AttemptHistory
from hpcrl.report.run_files import RunFiles
from hpcrl.run_folder import branches_of, hang_path

T = TypeVar("T")
PROFILES = "profiles"
"""Folder of profiled steps in the run folder (profile.steps)."""


def best_checkpoint(run: RunFiles) -> str:
    """What checkpoints/BEST says; empty without it, or if it is damaged: the next attempt writes it again."""
    try:
        best = msgspec.convert(run.json(f"checkpoints/{BEST}"), Best)
    except msgspec.ValidationError:
        return ""
    return f"step {best.step}, {best.metric} {best.value:.4g} (checkpoints/{BEST})"


def branches(run: RunFiles) -> list[str]:
    """A line for each branch, oldest first."""
    lines = []
    for branch in _recorded_branches(run):
        changes = branch["changes"] if isinstance(branch["changes"], list) else []
        reason = f" ({branch['reason']})" if branch["reason"] else ""
        told = ", ".join(map(str, changes)) or "nothing changed"
        lines.append(f"attempt {branch['attempt']} from step {branch['from']}: {told}{reason}")
    return lines


def _recorded_branches(run: RunFiles) -> list[dict[str, Any]]:
    return branches_of([{**attempt.facts, "attempt": attempt.number} for attempt in run.attempts])


def branched_attempts(run: RunFiles) -> set[int]:
    """The attempts that opened a branch."""
    return {branch["attempt"] for branch in _recorded_branches(run)}


def abandoned_metrics(run: RunFiles, past: Sequence[AttemptHistory]) -> tuple[MetricTable, MetricTable]:
    """Metrics of the steps that were lost, and of those that were left for a branch."""
    found = MetricTable(), MetricTable()
    opened = branched_attempts(run)
    for attempt in past:
        for row in run.lines(f"abandoned/{attempt.number}/metrics.jsonl"):
            found[attempt.number in opened].add(row)
    return found


def steps_lost(run: RunFiles, past: Sequence[AttemptHistory]) -> str:
    """How many steps were computed again after a loss, and how many were left on purpose for a branch; empty for a
    single attempt."""
    if len(past) < 2:
        return ""
    opened = branched_attempts(run)
    left = sum(len(attempt.lost_steps) for attempt in past if attempt.number + 1 in opened)
    again = sum(len(attempt.lost_steps) for attempt in past) - left
    told = f"{again} step(s) were computed again" if again else "nothing: no step was computed again"
    return told + (f"; {left} step(s) were left for a branch" if left else "")


def evaluation(run: RunFiles) -> dict[str, Any] | None:
    """The table of an evaluation alone (evaluation.json); None for another run."""
    rows = _of_summary(run, table_rows)
    return {"columns": list(COLUMNS), "rows": [list(row) for row in rows]} if rows else None


def scores(run: RunFiles) -> list[str]:
    """The score of each set of an evaluation alone, in a few words; empty for another run."""
    return _of_summary(run, scores_in_short)


def _of_summary(run: RunFiles, read: Callable[[dict[str, Any]], list[T]]) -> list[T]:
    summary = run.json(SUMMARY)
    try:
        return read(summary) if summary else []
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        run.problems.append(f"{SUMMARY}: {type(error).__name__}: {error}")
        return []


def hang_reports(run: RunFiles) -> list[str]:
    """The paths of reports of hangs, in the run folder."""
    names = [str(hang_path(run.path, attempt.number).relative_to(run.path)) for attempt in run.attempts]
    return [name for name in names if run.text(name, 1)]


def profiled_steps(run: RunFiles) -> list[str]:
    """A line for each profiled step: its folder and files."""
    steps = [path.name for path in run.entries(PROFILES)]
    found = {name: [path.name for path in run.entries(f"{PROFILES}/{name}")] for name in steps}
    return [f"{PROFILES}/{name}: {', '.join(files)}" for name, files in found.items() if files]
