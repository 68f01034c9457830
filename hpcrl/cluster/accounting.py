"""Starts of jobs in Slurm's accounting database: time, resources and energy. Imports no torch."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcrl.cluster.slurm import TRIAL_S, call

FIELDS = ("JobID", "JobIDRaw", "State", "Start", "End", "ElapsedRaw", "AllocTRES", "ConsumedEnergyRaw")
NUMBER = re.compile(r"[0-9]{1,18}")
DECIMAL = re.compile(r"[0-9]{1,20}(\.[0-9]+)?")
"""NO_VAL64 has 20 digits; numbers with more are none of Slurm's."""
NO_ENERGY = (0.0, float(2**32 - 2), float(2**64 - 2))
"""Slurm's values of ConsumedEnergyRaw where nothing was measured: 0, NO_VAL and NO_VAL64."""


@dataclass(frozen=True)
class AccountedStart:
    """One start of a job, or of one component of a heterogeneous job; a requeue is another start.

    Args:
        job: The job's id; for a component, its leader's.
        component: Number of the component, 0 for a plain job.
        state: Slurm's word, such as COMPLETED or PREEMPTED.
        began: Seconds since the epoch.
        ended: The same; None while it runs, or if its record was never closed.
        elapsed_s: Without the time in which the job was suspended.
        cpus: As Slurm counts them, which may be hardware threads.
        gpus: None if the record names no GPU: it has none, or the site does not account them.
        joules: None if no energy was accounted, as for steps that still run.
    """

    job: int
    component: int
    state: str
    began: float
    ended: float | None
    elapsed_s: float
    nodes: int
    cpus: int
    gpus: int | None
    joules: float | None


@dataclass(frozen=True)
class Accounting:
    """The starts of a run's jobs; `missing` is why there are none, empty if Slurm answered or was not asked."""

    starts: tuple[AccountedStart, ...] = ()
    missing: str = ""


class _Step(NamedTuple):
    began: float
    ended: float
    joules: float


def accounted_starts(jobs: Collection[int], cluster: str = "", timeout_s: float = TRIAL_S) -> list[AccountedStart]:
    """All starts of these jobs that had nodes, with the components of heterogeneous jobs. `cluster` is the cluster of
    the jobs, empty for the one that Slurm's commands use. SlurmError if Slurm has no accounting, or gives no answer
    within timeout_s."""
    where = ["-M", cluster] if cluster else []
    numbers = ",".join(map(str, sorted(jobs)))
    # -D: also the starts before a requeue
    return read_starts(
        call("sacct", "-n", "-P", "-D", *where, "-j", numbers, "-o", ",".join(FIELDS), timeout_s=timeout_s)
    )


def read_starts(text: str) -> list[AccountedStart]:
    """The starts in the output of `sacct -P -o FIELDS`; lines in another form, and starts without nodes, are left
    out. A job's steps follow its own line."""
    records: list[tuple[list[str], list[list[str]]]] = []
    for line in text.splitlines():
        values = line.split("|")
        if len(values) != len(FIELDS):
            continue
        if "." not in values[0]:
            records.append((values, []))
        elif records:
            records[-1][1].append(values)
    return [start for own, steps in records if (start := _start(own, steps)) is not None]


def _start(values: Sequence[str], steps: Sequence[Sequence[str]]) -> AccountedStart | None:
    name, raw, state, start, end, elapsed, resources, _ = values
    leader, plus, component = name.partition("+")
    job = leader if plus else raw  # of an array, JobID is not the id of the job
    began, ended = _number(start), _number(end)
    tres = dict(part.partition("=")[::2] for part in resources.split(","))
    nodes, cpus = (_number(tres.get(each, "")) for each in ("node", "cpu"))
    if not NUMBER.fullmatch(job) or began is None or not nodes:
        return None
    until = math.inf if ended is None else ended
    known = [
        _Step(_number(step[3]) or began, _number(step[4]) or until, joules)
        for step in steps
        if (joules := _energy(step[7])) is not None
    ]
    return AccountedStart(
        int(job),
        int(component) if NUMBER.fullmatch(component) else 0,
        state.split(" ")[0],  # CANCELLED by 1000
        began,
        ended,
        _number(elapsed) or 0.0,
        int(nodes),
        int(cpus or 0),
        _gpus(tres),
        _energy(values[7]) if not steps else _most(known),
    )


def _gpus(tres: dict[str, str]) -> int | None:
    """GPUs of a record; a site may account them by type only, or both ways."""
    if (plain := _number(tres.get("gres/gpu", ""))) is not None:
        return int(plain)
    typed = [_number(count) or 0.0 for name, count in tres.items() if name.startswith("gres/gpu:")]
    return int(sum(typed)) if typed else None


def _most(steps: Sequence[_Step]) -> float | None:
    """The largest energy of steps that do not overlap in time: a step counts the whole energy of its nodes, also what
    another step uses beside it. None without steps."""
    ordered = sorted(steps, key=lambda step: step.ended)
    ends = [step.ended for step in ordered]
    best = [0.0]  # of the first n steps
    for place, step in enumerate(ordered):
        before = bisect_right(ends, step.began, 0, place)
        best.append(max(best[-1], best[before] + step.joules))
    return best[-1] if ordered else None


def _energy(text: str) -> float | None:
    joules = _number(text)
    return None if joules is None or joules in NO_ENERGY else joules


def _number(text: str) -> float | None:
    return float(text) if DECIMAL.fullmatch(text) else None
