"""Which role used a run's GPUs for what: measured in some recorded steps, and apportioned to the others.

The duration of every step is in metrics.jsonl; what each rank did in it is in the step's timeline, of which a run keeps
few. Steps with a save, with a validation, with both and with neither are apportioned separately, since the kept
timelines have more of some kinds: a kind's timelines stand for all of its steps. A run without GPUs is counted in hours
of ranks.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import ConfigError
from hpcrl.report.attempt_history import AttemptHistory, histories
from hpcrl.report.run_files import RunFiles
from hpcrl.report.run_hours import AttemptHours, RunHours
from hpcrl.spec.tables import ROLES
from hpcrl.timeline.step_file import FOLDER, StepTimeline, path_of, read_step, steps_among
from hpcrl.timeline.waiting import DECODING, ENVIRONMENTS, REWARDS, LanePiece, RankActivity

WAIT, OTHER_WORK, EVALUATE = "wait", "other work", "evaluate"
PHASE_OF = {
    DECODING: "generate",
    REWARDS: "score",
    ENVIRONMENTS: "environments",
    "rollout transfer": "transfer",
    "loading rows": "transfer",
    "weight updates": "publish",
    "saves": "save",
    "storing rollouts": "save",
    "validation": EVALUATE,
    **dict.fromkeys(
        (
            "training",
            "log-probs",
            "advantages",
            "values",
            "the teacher",
            "training the critic",
            "updates of the reference",
            "updates of the teacher",
        ),
        "train",
    ),
}
"""Activity of a rank (hpcrl.timeline.waiting) -> phase; during a validation, all work is of phase evaluate."""
PHASES = ("generate", "score", "environments", "transfer", "train", "publish", EVALUATE, "save", OTHER_WORK, WAIT)
START, LOST, LEFT, UNSHOWN, REST = "start", "lost", "left for a branch", "steps without a timeline", "other"
STEPS_OF_KIND = 5
MAX_BYTES = 48 << 20
"""Timelines that are read: evenly spread ones of each kind of step, and at most so many bytes of all kinds."""


@dataclass(frozen=True)
class RoleHours:
    """Ranks with equal roles: phase -> hours of their GPUs, or of the ranks in a run without GPUs."""

    roles: str
    ranks: int
    hours: dict[str, float]


@dataclass(frozen=True)
class HoursSplit:
    """Where the hours of GPUs, or of ranks, went.

    Args:
        unit: `GPU-hours` or `rank-hours`.
        total: All hours of the attempts and jobs; the phases have more if times of attempts are unknown.
        phases: Phase -> hours, over all roles; what is not of steps follows those of steps.
        roles: The same for each role, only of steps that a timeline stands for.
        steps: How many steps count.
        read: How many timelines were read, with this share of all steps' time.
    """

    unit: str
    total: float
    phases: dict[str, float]
    roles: list[RoleHours]
    steps: int
    read: int
    share: float

    @property
    def idle(self) -> float | None:
        """The share of waiting in the steps that timelines stand for; None without one."""
        whole = sum(sum(role.hours.values()) for role in self.roles)
        return sum(role.hours.get(WAIT, 0.0) for role in self.roles) / whole if whole else None


@dataclass
class _Kind:
    """Steps of one kind: all seconds of them, and each recorded step with its seconds."""

    seconds: float = 0.0
    recorded: dict[int, float] = field(default_factory=dict)


def hours_split(run: RunFiles, hours: RunHours) -> HoursSplit | None:
    """The hours by phase and role; None for a run that has computed nothing, or does not train."""
    if not hours.attempts or (run.checked is not None and not run.checked.pipeline_spec.trains):
        return None
    on_gpus = bool(hours.total.gpu)
    kinds = _kinds(run)
    steps_s = sum(kind.seconds for kind in kinds.values())
    used: dict[tuple[str, ...], defaultdict[str, float]] = {}
    sizes: dict[tuple[str, ...], int] = {}
    read, read_s, stood_for_s, left_bytes = 0, 0.0, 0.0, MAX_BYTES
    for kind in kinds.values():
        found: list[StepHours] = []
        found_s = 0.0  # as in the metrics: a timeline also has what follows its step, such as a save
        for step in _spread(list(kind.recorded), STEPS_OF_KIND):
            shown, size = _read(run, step, left_bytes)
            left_bytes -= size
            if shown is not None:
                found.append(shown)
                found_s += kind.recorded[step]
        seconds = sum(each.seconds for each in found)
        if not seconds:
            continue
        read, read_s, stood_for_s = read + len(found), read_s + found_s, stood_for_s + kind.seconds
        for each in found:
            for roles, (num, spent) in each.roles.items():
                sizes[roles] = max(sizes.get(roles, 0), num)
                mine = used.setdefault(roles, defaultdict(float))
                for phase, microseconds in spent.items():
                    mine[phase] += microseconds / 1e6 * kind.seconds / seconds / 3600
    counted = {roles: spent for roles, spent in used.items() if not on_gpus or _holds_model(roles)}
    listed = [
        RoleHours(", ".join(roles), sizes[roles], {phase: spent[phase] for phase in PHASES if spent[phase]})
        for roles, spent in counted.items()
    ]
    phases = {phase: value for phase in PHASES if (value := sum(role.hours.get(phase, 0.0) for role in listed))}
    total, outside = _outside(run, hours, on_gpus, steps_s - stood_for_s, sum(phases.values()))
    phases |= outside
    unit = "GPU-hours" if on_gpus else "rank-hours"
    num_steps = int((run.metrics.steps > 0).sum())
    return HoursSplit(unit, total, phases, listed, num_steps, read, read_s / steps_s if steps_s else 0.0)


@dataclass(frozen=True)
class StepHours:
    """A recorded step: roles -> (ranks, phase -> microseconds of all these ranks)."""

    seconds: float
    roles: dict[tuple[str, ...], tuple[int, Counter[str]]]


def _kinds(run: RunFiles) -> dict[tuple[bool, bool], _Kind]:
    """(saves, validates) -> the steps of this kind. Step 0, before the first one, belongs to the start."""
    table = run.metrics
    saves, validates = (table.dense(name) > 0 for name in ("time/save", "time/val_step"))
    seconds = table.dense("time/step_total") + table.dense("time/val_step")
    recorded = set(steps_among(path.name for path in run.entries(FOLDER)))
    kinds: dict[tuple[bool, bool], _Kind] = {}
    for step, save, validate, lasted in zip(table.steps.tolist(), saves, validates, seconds, strict=True):
        if step > 0:
            kind = kinds.setdefault((bool(save), bool(validate)), _Kind())
            kind.seconds += float(lasted)
            if step in recorded:
                kind.recorded[step] = float(lasted)
    return kinds


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """At most so many of the steps, evenly spread, with the newest."""
    ordered = sorted(set(steps), reverse=True)
    count = min(most, len(ordered))
    return [ordered[place * len(ordered) // count] for place in range(count)]


def _read(run: RunFiles, step: int, most_bytes: int) -> tuple[StepHours | None, int]:
    """A recorded step and its file's size; None if the file is larger than most_bytes, or cannot be read."""
    if run.file(str(path_of(Path(), step))) is None:
        return None, 0
    path = path_of(run.path, step)
    try:
        status = path.stat()
        if status.st_size > most_bytes:
            return None, 0
        return _of_file(path, status.st_mtime_ns, status.st_size), status.st_size
    except (ValueError, OSError, OverflowError) as error:  # OverflowError: an infinite duration
        run.problems.append(" ".join(str(error).split()))
        return None, 0


@functools.lru_cache(maxsize=128)
def _of_file(path: Path, modified_ns: int, size: int) -> StepHours:
    """Once per version of a file: a server makes the page of a run again and again."""
    return step_hours(read_step(path))


def step_hours(step: StepTimeline) -> StepHours:
    """What the ranks of each role did in a step; the phases of a rank, with WAIT, add up to the step."""
    activity = RankActivity(step)
    validating = [(start, end) for start, end, what in activity.pipeline() if what == "validation"]
    found: dict[tuple[str, ...], tuple[int, Counter[str]]] = {}
    for rank in step.header.ranks:
        roles = tuple(rank.roles)
        if roles == ("controller",):
            continue
        num, spent = found.get(roles, (0, Counter()))
        busy = 0
        for piece in activity.busy.get(rank.rank, []):
            inside = _overlap(piece, validating)
            length = piece[1] - piece[0]
            spent[EVALUATE] += inside
            spent[PHASE_OF.get(piece[2], OTHER_WORK)] += length - inside
            busy += length
        spent[WAIT] += step.length - busy
        found[roles] = num + 1, spent
    return StepHours(step.length / 1e6, found)


def _overlap(piece: LanePiece, spans: Sequence[tuple[int, int]]) -> int:
    """Microseconds of a piece inside disjoint, ascending spans."""
    place = max(bisect_right(spans, (piece[0], piece[1])) - 1, 0)
    inside = 0
    while place < len(spans) and spans[place][0] < piece[1]:
        inside += max(min(piece[1], spans[place][1]) - max(piece[0], spans[place][0]), 0)
        place += 1
    return inside


def _outside(
    run: RunFiles, hours: RunHours, on_gpus: bool, unshown_s: float, in_steps: float
) -> tuple[float, dict[str, float]]:
    """All hours; and phase -> hours of what no timeline stands for, where REST is what remains of all hours."""
    past = {history.number: history for history in histories(run)}
    first_s = dict(zip(run.metrics.steps.tolist(), run.metrics.dense("time/step_total").tolist(), strict=True))
    ranks = 0 if on_gpus else _num_ranks(run)
    rates = {each.number: _rate(each, ranks) for each in hours.attempts}
    total = hours.total.gpu or 0.0
    if not on_gpus:
        total = sum(rates[each.number] * (each.seconds or 0.0) for each in hours.attempts)
    works = (hours.lost, hours.left)
    lost, left = ((work.spent.gpu or 0.0) if on_gpus else work.seconds * ranks / 3600 for work in works)
    found = {
        UNSHOWN: max(unshown_s, 0.0) * float(np.mean(list(rates.values()))),
        START: sum(_start_s(past[number], first_s) * rate for number, rate in rates.items() if number in past),
        LOST: lost,
        LEFT: left,
    }
    found[REST] = total - in_steps - sum(found.values())
    return total, {phase: value for phase, value in found.items() if value > 1e-9}


def _rate(attempt: AttemptHours, ranks: int) -> float:
    """Hours of GPUs, or of ranks, in a second of an attempt."""
    if ranks:
        return ranks / 3600
    return (attempt.spent.gpu or 0.0) / attempt.seconds if attempt.seconds else 0.0


def _start_s(history: AttemptHistory, first_s: dict[int, float]) -> float:
    """Seconds from an attempt's begin to the begin of its first step, or to its end if it completed none."""
    if history.began is None:
        return 0.0
    if history.first_step_at is None:
        return max((history.ended or history.began) - history.began, 0.0)
    step_s = first_s.get((history.resumed_from or 0) + 1, 0.0)
    return max(history.first_step_at - history.began - step_s, 0.0)


def _holds_model(roles: Sequence[str]) -> bool:
    return any(ROLES[role].holds_model for role in roles if role in ROLES)


def _num_ranks(run: RunFiles) -> int:
    """Ranks of the newest layout without the controller; 0 if the configuration does not say."""
    if run.checked is None:
        return 0
    try:
        layout = RoleLayout.from_config(run.checked)
    except ConfigError:
        return 0
    return len({rank for role, ranks in layout.ranks.items() if role != "controller" for rank in ranks})
