"""Node-hours, GPU-hours, core-hours and energy of a run: of every attempt and job, and of the work that was lost.

A job that hpcrl submitted counts with the whole time of each start, as Slurm's accounting has it. An attempt that the
accounting does not have, or that ran inside an allocation of another purpose, counts from its begin to its end, with
the nodes that its preflight saw, else those of the configuration.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpcrl.cluster import slurm
from hpcrl.cluster.accounting import AccountedStart, Accounting, accounted_starts
from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement, cpus_of_node
from hpcrl.config import ConfigError
from hpcrl.report.attempt_history import begin_of, end_of
from hpcrl.report.landmarks import branched_attempts
from hpcrl.report.run_files import RunAttempt, RunFiles
from hpcrl.run_folder import SLURM, SUBMITTED, world_folder
from hpcrl.system.files import STEP_NAME

LIVING = ("running", "ending", "suspended", "stopped", "signaling", "resizing")
"""States of a run (hpcrl.commands.status) in which its newest attempt holds its nodes, unless a record says how it
ended; not `starting`, when the next attempt has not begun."""
CLOCK_S = 5.0
"""An attempt may have begun this long before its job, by clocks of different hosts."""
REUSED_S = 30 * 86400.0
"""A start that ended this long before the run's first attempt is of another job that had the same id."""
JOULES_PER_KWH = 3.6e6
MAX_STEP_S = 1e8
"""A damaged row may have any number; three years are no step."""
JOB_LOG = re.compile(r"job-(\d+)\.log")


@dataclass(frozen=True)
class SpentHours:
    """Hours of nodes, GPUs and CPU cores; None if it is unknown how many there were."""

    node: float | None = None
    gpu: float | None = None
    cpu: float | None = None

    def __add__(self, other: SpentHours) -> SpentHours:
        """The sum; what is unknown on one side does not count."""
        return SpentHours(*(_sum(mine, its) for mine, its in zip(self.values, other.values, strict=True)))

    def times(self, factor: float) -> SpentHours:
        return SpentHours(*(None if value is None else value * factor for value in self.values))

    @property
    def values(self) -> tuple[float | None, ...]:
        return self.node, self.gpu, self.cpu


@dataclass(frozen=True)
class AttemptHours:
    """What one attempt used.

    Args:
        job: Its Slurm job and `restarts` of it; None outside of Slurm.
        seconds: How long it held its nodes; None if its begin or end is unknown.
        kwh: Energy; None if none was accounted, for any component.
        accounted: Whether the time is Slurm's, not that between the attempt's records.
        runs: Whether it still runs.
    """

    number: int
    job: int | None
    restarts: int | None
    began: float | None
    seconds: float | None
    spent: SpentHours
    kwh: float | None
    accounted: bool
    runs: bool


@dataclass(frozen=True)
class JobHours:
    """What one job used in all of its starts; `idle_starts` of them began no attempt."""

    job: int
    starts: int
    idle_starts: int
    spent: SpentHours
    kwh: float | None


@dataclass(frozen=True)
class LostWork:
    """Complete steps whose work is gone, or would be gone if the run were killed now."""

    steps: int = 0
    seconds: float = 0.0
    spent: SpentHours = SpentHours()


@dataclass(frozen=True)
class RunHours:
    """What a run used, over all attempts and jobs.

    Args:
        total: The sum over the jobs, and over attempts outside of them.
        kwh: Accounted energy; None without any.
        kwh_node: Node-hours that have this energy; the energy of the others is unknown.
        lost: Steps that a kill cost: computed, not in a checkpoint, and moved away to be computed again.
        left: Steps that were left on purpose, for a branch.
        unsaved: Steps after the newest checkpoint of a run that has not finished.
        gone: Whether the run has ended without a report or waits for its next job, so `unsaved` is lost.
        notes: What is unknown, and why.
    """

    attempts: list[AttemptHours]
    jobs: list[JobHours]
    total: SpentHours
    kwh: float | None
    kwh_node: float
    lost: LostWork
    left: LostWork
    unsaved: LostWork
    gone: bool
    notes: list[str] = field(default_factory=list)

    @property
    def all_lost(self) -> LostWork:
        """The work that is lost, with that of a run that ended after its newest checkpoint."""
        return _together(self.lost, self.unsaved) if self.gone else self.lost


@dataclass
class _Draft:
    """An attempt while its hours are added up; a share is (seconds, hours, kWh) of a component."""

    attempt: RunAttempt
    began: float | None
    ended: float | None
    runs: bool
    held: tuple[int | None, int | None, int | None]
    shares: list[tuple[float, SpentHours, float | None]] = field(default_factory=list)

    @property
    def job(self) -> int | None:
        return _whole(self.attempt.owner.get("job"))


def accounting_of(run: RunFiles, timeout_s: float = slurm.TRIAL_S) -> Accounting:
    """Asks Slurm's accounting for the run's jobs; `missing` says why, if it has no answer within timeout_s for each
    cluster. Nothing is asked for a run without jobs."""
    clusters: dict[str, set[int]] = {}
    newest = str(run.json(SUBMITTED).get("cluster") or "")
    homes = {_whole(attempt.owner.get("job")): attempt.owner.get("cluster") for attempt in run.attempts}
    for job in submitted(run):
        clusters.setdefault(str(homes.get(job) or newest), set()).add(job)
    found: list[AccountedStart] = []
    missing = ""
    for cluster, jobs in clusters.items():
        try:
            found += accounted_starts(jobs, cluster, timeout_s)
        except slurm.SlurmError as error:
            _, several, last = str(error).rpartition("; sacct: ")
            missing = f"no accounting: {'sacct: ' if several else ''}{last}"
    return Accounting(tuple(found), missing or ("" if found or not clusters else "Slurm's accounting has no such job"))


def submitted(run: RunFiles) -> set[int]:
    """All jobs that were submitted for the run: of its newest submission, those that have a log, and those that own an
    attempt. An attempt that belongs to a process ran inside a job of another purpose."""
    named = run.json(SUBMITTED).get("jobs")
    jobs = {job for job in (named if isinstance(named, list) else []) if _whole(job)}
    jobs |= {job for each in run.attempts if "pid" not in each.owner and (job := _whole(each.owner.get("job")))}
    logs = (JOB_LOG.fullmatch(path.name) for path in run.entries(SLURM))
    return jobs | {int(log[1]) for log in logs if log}


def run_hours(run: RunFiles, now: float | None = None) -> RunHours:
    """The hours of a run, from its records and `run.accounting`; a living attempt counts until `now`."""
    now = time.time() if now is None else now
    drafts = _drafts(run, now)
    first = min((draft.began for draft in drafts if draft.began is not None), default=0.0)
    starts = [start for start in run.accounting.starts if (start.ended or now) > first - REUSED_S]
    jobs = _shared(starts, drafts, now)
    attempts = [_attempt(draft) for draft in drafts]
    total = _all([*(job.spent for job in jobs), *(each.spent for each in attempts if not each.accounted)])
    known = [start for start in starts if start.joules is not None]
    lost, left = _lost(run, attempts)
    unsaved = LostWork() if run.finished or not attempts else _unsaved(run, attempts[-1])
    gone = bool(attempts) and not attempts[-1].runs and run.state.split(":")[0] not in ("", "unknown")
    return RunHours(
        attempts,
        jobs,
        total,
        sum(start.joules or 0.0 for start in known) / JOULES_PER_KWH if known else None,
        sum(start.nodes * start.elapsed_s / 3600 for start in known),
        lost,
        left,
        unsaved,
        gone,
        list(_notes(run, attempts)),
    )


def _drafts(run: RunFiles, now: float) -> list[_Draft]:
    attempts = run.attempts
    held = _configured(run)
    found = []
    for place, attempt in enumerate(attempts):
        runs = place == len(attempts) - 1 and "ended" not in attempt.owner and not run.finished
        runs = runs and run.state.split(":")[0] in LIVING
        ended = now if runs else end_of(run, attempt)
        found.append(_Draft(attempt, begin_of(attempt), ended, runs, _seen(run, attempt.number) or held))
    return found


def _shared(starts: Sequence[AccountedStart], drafts: Sequence[_Draft], now: float) -> list[JobHours]:
    """Gives each start's hours to its attempts; returns the hours of the jobs. Each attempt belongs to the last start
    of its job that had begun by then, and holds the nodes until the next attempt begins."""
    names_gpus = any(start.gpus for start in starts)
    components: dict[tuple[int, int], list[AccountedStart]] = {}
    for start in sorted(starts, key=lambda start: start.began):
        components.setdefault((start.job, start.component), []).append(start)
    of_job: dict[int, list[tuple[SpentHours, float | None]]] = {}
    counts: dict[int, tuple[int, int]] = {}
    for (job, _), records in components.items():
        idle = 0
        for record, after in zip(records, [*records[1:], None], strict=True):
            until = (record.ended or now) if after is None else min(record.ended or now, after.began)
            members = [
                draft
                for draft in drafts
                if draft.job == job and draft.began is not None and record.began - CLOCK_S <= draft.began
                if draft.began <= until + CLOCK_S and (after is None or draft.began < after.began - CLOCK_S)
            ]
            seconds, lasts = record.elapsed_s, until
            if record.ended is None and members and not members[-1].runs:  # its record was never closed
                lasts = members[-1].ended or members[-1].began or until
                seconds = min(seconds, max(lasts - record.began, 0.0))
            gpus = record.gpus if record.gpus is not None or not names_gpus else 0
            whole = _spent((record.nodes, gpus, record.cpus), seconds)
            kwh = None if record.joules is None else record.joules / JOULES_PER_KWH
            of_job.setdefault(job, []).append((whole, kwh))
            idle += not members
            edges = [record.began, *(member.began or record.began for member in members[1:]), lasts]
            for draft, (begin, end) in zip(members, pairwise(edges), strict=False):
                share = 1.0 if len(members) == 1 else max(end - begin, 0.0) / max(lasts - record.began, 1e-9)
                draft.shares.append((seconds * share, whole.times(share), kwh if len(members) == 1 else None))
        before = counts.get(job, (0, 0))
        counts[job] = max(before[0], len(records)), max(before[1], idle)
    found = []
    for job, parts in sorted(of_job.items()):
        known = [kwh for _, kwh in parts if kwh is not None]
        found.append(JobHours(job, *counts[job], _all(spent for spent, _ in parts), sum(known) if known else None))
    return found


def _attempt(draft: _Draft) -> AttemptHours:
    restarts = _whole(draft.attempt.owner.get("restarts"), 0)
    kwh: float | None = None
    seconds: float | None
    if draft.shares:
        seconds = max(share[0] for share in draft.shares)
        spent = _all(share[1] for share in draft.shares)
        if spent.gpu is None:  # the site does not account GPUs
            spent = SpentHours(spent.node, _spent(draft.held, seconds).gpu, spent.cpu)
        energies = [share[2] for share in draft.shares]
        kwh = None if None in energies else sum(each or 0.0 for each in energies)
    else:
        known = draft.began is not None and draft.ended is not None
        seconds = max((draft.ended or 0.0) - (draft.began or 0.0), 0.0) if known else None
        spent = SpentHours() if seconds is None else _spent(draft.held, seconds)
    number, job = draft.attempt.number, draft.job
    return AttemptHours(number, job, restarts, draft.began, seconds, spent, kwh, bool(draft.shares), draft.runs)


def _seen(run: RunFiles, attempt: int) -> tuple[int | None, int | None, int | None] | None:
    """Nodes, GPUs and CPUs that the attempt's preflight saw; None without one."""
    folder = f"{world_folder(Path(), attempt)}/preflight"
    for meeting in sorted(run.entries(folder), key=lambda path: path.name, reverse=True):
        names = [f"{folder}/{meeting.name}/{path.name}" for path in run.entries(f"{folder}/{meeting.name}")]
        reports = [run.json(name) for name in names if re.search(r"/node_\d+\.json$", name)]
        if reports:
            return len(reports), _count(reports, "gpus"), _count(reports, "cpus") or None
    return None


def _count(reports: Sequence[dict[str, Any]], key: str) -> int | None:
    """The sum over the nodes; None if a node does not say."""
    counts = [_whole(report.get(key), 0) for report in reports]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _configured(run: RunFiles) -> tuple[int | None, int | None, int | None]:
    """Nodes, GPUs and CPUs of the configuration, or of this machine's part in it."""
    config = run.checked
    if config is None:
        return None, None, None
    try:
        layout = RoleLayout.from_config(config)
        components = Placement.from_config(config, layout).components
    except ConfigError:
        return None, None, None
    if config.cluster.name == "local":
        cpus = next((_whole(attempt.facts.get("num_cpus")) for attempt in reversed(run.attempts)), None)
        gpus = {"cuda": len(layout.ranks_with_model), "cpu": 0}
        return 1, 0 if config.debug == "fake" else gpus.get(config.cluster.device), cpus
    return (
        sum(len(each.nodes) for each in components),
        sum(len(each.nodes) * each.config.gpus_per_node for each in components),
        sum(len(each.nodes) * cpus_of_node(each, config.cluster) for each in components),
    )


def _lost(run: RunFiles, attempts: Sequence[AttemptHours]) -> tuple[LostWork, LostWork]:
    """Steps that attempts moved to abandoned/: lost ones, and those left for a branch. The attempt before computed
    them."""
    lost, left = LostWork(), LostWork()
    opened = branched_attempts(run)
    for before, taker in pairwise(attempts):
        found = _work(run.lines(f"abandoned/{taker.number}/metrics.jsonl"), before)
        if taker.number in opened:
            left = _together(left, found)
        else:
            lost = _together(lost, found)
    return lost, left


def _unsaved(run: RunFiles, newest: AttemptHours) -> LostWork:
    """Steps after the newest checkpoint, among the newest rows of metrics; none for a run that does not train."""
    if run.checked is not None and not run.checked.pipeline_spec.trains:
        return LostWork()
    names = (STEP_NAME.fullmatch(path.name) for path in run.entries("checkpoints"))
    committed = max((int(name[1]) for name in names if name), default=-1)
    return _work((row for row in run.newest_rows if row["step"] > committed), newest)


def _work(rows: Iterable[dict[str, Any]], by: AttemptHours) -> LostWork:
    """The steps of some rows of metrics, at what the attempt that computed them holds in a second."""
    times: dict[int, float] = {}
    for row in rows:
        if isinstance(step := row.get("step"), int) and step > 0:
            times[step] = sum(_seconds_of(row.get(name)) for name in ("time/step_total", "time/val_step"))
    seconds = sum(times.values())
    spent = by.spent.times(seconds / by.seconds) if by.seconds else SpentHours()
    return LostWork(len(times), seconds, spent)


def _together(one: LostWork, other: LostWork) -> LostWork:
    return LostWork(one.steps + other.steps, one.seconds + other.seconds, one.spent + other.spent)


def _notes(run: RunFiles, attempts: Sequence[AttemptHours]) -> Iterable[str]:
    if run.accounting.missing:
        yield f"{run.accounting.missing}: times are those between the begin and the end of attempts"
    by_time = [attempt.number for attempt in attempts if not attempt.accounted and attempt.seconds is not None]
    if by_time and not run.accounting.missing and any(attempt.accounted for attempt in attempts):
        yield f"attempts {_list(by_time)} are not in Slurm's accounting: from their begin to their end"
    if unknown := [attempt.number for attempt in attempts if attempt.seconds is None]:
        yield f"attempts {_list(unknown)} are not counted: when they began or ended is unknown"
    for word, what in (("node", "nodes"), ("gpu", "GPUs"), ("cpu", "cores")):
        timed = [attempt for attempt in attempts if attempt.seconds is not None]
        if lacks := [attempt.number for attempt in timed if getattr(attempt.spent, word) is None]:
            yield f"attempts {_list(lacks)}: how many {what} they had is unknown"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def _spent(held: Sequence[int | None], seconds: float) -> SpentHours:
    return SpentHours(*(None if count is None else count * seconds / 3600 for count in held))


def _all(spent: Iterable[SpentHours]) -> SpentHours:
    return reduce(SpentHours.__add__, spent, SpentHours())


def _sum(one: float | None, other: float | None) -> float | None:
    return one if other is None else other if one is None else one + other


def _seconds_of(value: object) -> float:
    """A duration in a row of metrics; 0 for what is none."""
    return float(value) if isinstance(value, int | float) and 0 <= value < MAX_STEP_S else 0.0


def _whole(value: object, least: int = 1) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None
