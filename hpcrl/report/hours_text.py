"""The hours of a run in words, and as values for JSON."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from hpcrl.metrics.duration import duration
from hpcrl.report.role_hours import WAIT, HoursSplit
from hpcrl.report.run_hours import AttemptHours, LostWork, RunHours, SpentHours

UNITS = ("node-hours", "GPU-hours", "core-hours")


def spent_in_words(spent: SpentHours, only: int = 3) -> str:
    """`12.5 node-hours, 100 GPU-hours, 800 core-hours`: what is known of the first `only` units; no GPU-hours without
    a GPU."""
    known = list(zip(spent.values, UNITS, strict=True))[:only]
    return ", ".join(f"{_number(value)} {unit}" for value, unit in known if value or (value == 0 and unit == UNITS[0]))


def energy_in_words(hours: RunHours) -> str:
    """`4.2 kWh in Slurm's accounting`, with the part of the hours that has it; empty without accounting of energy."""
    if hours.kwh is None:
        return ""
    whole = hours.total.node or 0.0
    part = (
        f", of {_number(hours.kwh_node)} of the {_number(whole)} node-hours" if hours.kwh_node < 0.999 * whole else ""
    )
    return f"{hours.kwh:.3g} kWh in Slurm's accounting ({len(hours.jobs)} job(s)){part}"


def lost_in_words(hours: RunHours) -> str:
    """What kills cost, and what is not in a checkpoint yet; empty if there is nothing."""
    parts = []
    if hours.all_lost.steps:
        parts.append(f"{_work(hours.all_lost)} computed and lost")
    if hours.left.steps:
        parts.append(f"{_work(hours.left)} left for a branch")
    if hours.unsaved.steps and not hours.gone:
        parts.append(f"{_work(hours.unsaved)} not in a checkpoint yet")
    return "; ".join(parts)


def in_short(hours: RunHours) -> str:
    """The hours in one line; empty if nothing is known."""
    parts = [spent_in_words(hours.total), energy_in_words(hours), lost_in_words(hours)]
    return "; ".join(filter(None, parts)) if parts[0] else ""


def in_full(hours: RunHours, split: HoursSplit | None) -> Iterator[str]:
    """All lines of the command `hpcrl cost` after the first."""
    yield f"hours     {spent_in_words(hours.total) or 'unknown'}"
    yield f"energy    {energy_in_words(hours) or 'unknown: no accounting has it'}"
    yield f"lost      {lost_in_words(hours) or 'no complete step'}"
    for note in hours.notes:
        yield f"note      {note}"
    if hours.attempts:
        yield ""
        yield from _table(
            ["attempt", "job", "began (UTC)", "time", *UNITS, "kWh", "time from"],
            [_attempt_cells(attempt) for attempt in hours.attempts],
        )
    if hours.jobs:
        yield ""
        yield from _table(
            ["job", "starts", "without attempt", *UNITS, "kWh"],
            [
                [str(job.job), str(job.starts), str(job.idle_starts), *_cells(job.spent), _cell(job.kwh)]
                for job in hours.jobs
            ],
        )
    if split is not None and split.phases:
        yield ""
        yield from _split(split)


def _split(split: HoursSplit) -> Iterator[str]:
    yield f"{split.unit} by phase: {measured_in_words(split)}"
    whole = sum(split.phases.values())
    for phase, value in split.phases.items():
        yield f"  {value / whole:6.1%}  {_number(value):>9}  {phase}"
    if split.idle is not None:
        yield f"idle: {split.idle:.1%} of the {split.unit} of these steps"
        names = list(dict.fromkeys(name for role in split.roles for name in role.hours))
        yield ""
        rows = []
        for role in split.roles:
            total = sum(role.hours.values())
            parts = [_cell(role.hours.get(name)) for name in names]
            rows.append([role.roles, str(role.ranks), _number(total), *parts, f"{role.hours.get(WAIT, 0) / total:.1%}"])
        yield from _table(["roles", "ranks", split.unit, *names, "idle"], rows)


def measured_in_words(split: HoursSplit) -> str:
    """What of the split is measured, and what is apportioned."""
    if not split.read:
        return "no timeline was read, so steps are not divided"
    told = (
        f"work measured in {split.read} of {split.steps} steps ({split.share:.1%} of their time), apportioned to the "
        "other steps of their kind; times of steps, starts and losses are measured"
    )
    more = sum(split.phases.values()) - split.total
    if split.total and more > 0.01 * split.total:
        told += f"; {_number(more)} {split.unit} more than the attempts' times, which are incomplete or wrong"
    return told


def as_json(hours: RunHours, split: HoursSplit | None) -> dict[str, Any]:
    """The same for programs; null is unknown."""
    total = _object(hours.total) | {"kwh": hours.kwh, "kwh_node_hours": hours.kwh_node}
    works = {"lost": hours.all_lost, "left_for_a_branch": hours.left}
    return {
        "total": total,
        **{name: _work_object(work) for name, work in works.items()},
        "unsaved": _work_object(LostWork() if hours.gone else hours.unsaved),
        "attempts": [
            {
                "attempt": attempt.number,
                "job": attempt.job,
                "restarts": attempt.restarts,
                "began": attempt.began,
                "seconds": attempt.seconds,
                "runs": attempt.runs,
                **_object(attempt.spent),
                "kwh": attempt.kwh,
                "from": _source(attempt),
            }
            for attempt in hours.attempts
        ],
        "jobs": [
            {
                "job": job.job,
                "starts": job.starts,
                "starts_without_attempt": job.idle_starts,
                **_object(job.spent),
                "kwh": job.kwh,
            }
            for job in hours.jobs
        ],
        "split": None
        if split is None
        else {
            "unit": split.unit,
            "total": split.total,
            "phases": split.phases,
            "roles": [{"roles": role.roles, "ranks": role.ranks, "hours": role.hours} for role in split.roles],
            "idle": split.idle,
            "steps": split.steps,
            "timelines_read": split.read,
            "measured_share": split.share,
        },
        "notes": hours.notes,
    }


def _source(attempt: AttemptHours) -> str:
    return "accounting" if attempt.accounted else "records" if attempt.seconds is not None else "unknown"


def _object(spent: SpentHours) -> dict[str, float | None]:
    return {"node_hours": spent.node, "gpu_hours": spent.gpu, "core_hours": spent.cpu}


def _work_object(work: LostWork) -> dict[str, Any]:
    return {"steps": work.steps, "seconds": work.seconds, **_object(work.spent)}


def _work(work: LostWork) -> str:
    hours = spent_in_words(work.spent, only=2)
    return f"{work.steps} step(s){f' of {hours}' if hours else ''}"


def _attempt_cells(attempt: AttemptHours) -> list[str]:
    job = "-" if attempt.job is None else f"{attempt.job}, restart {attempt.restarts or 0}"
    began = "-" if attempt.began is None else _when(attempt.began)
    lasted = "-" if attempt.seconds is None else duration(attempt.seconds) + (", runs" if attempt.runs else "")
    return [str(attempt.number), job, began, lasted, *_cells(attempt.spent), _cell(attempt.kwh), _source(attempt)]


def _when(seconds: float) -> str:
    try:
        return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "-"


def _cells(spent: SpentHours) -> list[str]:
    return [_cell(value) for value in spent.values]


def _cell(value: float | None) -> str:
    return "-" if value is None else _number(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for cells in (head, *rows):
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
