"""What each rank did in a step, and what it waited for while it did nothing.

A rank is busy while it executes a command, or scores samples or plays environments. In every other moment it waits, and
the cause is what rank 0's pipeline waited for in this moment: the pipeline is sequential, and sends the next command
when the previous one has ended everywhere. While the pipeline collects rollouts, the cause is what other ranks did.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from hpcrl.timeline.step_file import StepTimeline

DECODING, REWARDS, ENVIRONMENTS = "decoding", "rewards", "environments"
GENERATION, SLOWER_REPLICAS, SCHEDULING, CONTROLLER = "generation", "slower replicas", "scheduling", "the controller"
OTHER = "other commands"
ACTIVITIES = {
    **dict.fromkeys(("DecodeChunk", "Admit", "AbortSamples", "Rescore", "DropSamples"), DECODING),
    **dict.fromkeys(("TransferRollouts", "BroadcastBatch", "SendTokens"), "rollout transfer"),
    **dict.fromkeys(("LoadRollouts", "LoadRows", "MixRows", "TakePairs"), "loading rows"),
    **dict.fromkeys(("Advantages", "SetSampleWeights"), "advantages"),
    **dict.fromkeys(("SaveState", "FinishSave", "AbandonSave", "SavePending", "Export", "ExportCritic"), "saves"),
    "WriteRollouts": "storing rollouts",
    **dict.fromkeys(("Logprobs", "StoreLogprobs", "ReadLogprobs"), "log-probs"),
    "Teach": "the teacher",
    "Values": "values",
    "TrainStep": "training",
    "LossStats": "validation",
    "TrainCritic": "training the critic",
    "UpdateWeights": "weight updates",
    **dict.fromkeys(("LoadReference", "ReleaseReference"), "updates of the reference"),
    **dict.fromkeys(("LoadTeacher", "LoadTeacherHead"), "updates of the teacher"),
    "rollouts": "rollouts",
    "validation": "validation",
}
"""Command, or what rank 0 waits for -> what a rank does or waits for."""
WORKS = {"reward": REWARDS, "turn": ENVIRONMENTS}

LanePiece = tuple[int, int, str]
"""Start and end in microseconds, and what happened between them."""


def activity_of(name: str) -> str:
    """What a rank does in this command."""
    return ACTIVITIES.get(name, OTHER)


@dataclass
class RoleShares:
    """Mean seconds per rank of the ranks that have exactly these roles; busy and waiting add up to the step's seconds.

    Args:
        busy: What the ranks did -> seconds, the longest first.
        waiting: What they waited for -> seconds, the longest first.
    """

    roles: tuple[str, ...]
    num_ranks: int
    busy: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)


class RankActivity:
    """The pieces of a step in which each rank was busy and in which it waited."""

    def __init__(self, step: StepTimeline):
        self._length = step.length
        self.busy: dict[int, list[LanePiece]] = _busy(step)
        phases = _innermost([(wait.start, wait.start + wait.duration, wait.what) for wait in step.waits], self._length)
        self._phases = _refined(phases, step, self._length)
        self._starts = [phase[0] for phase in self._phases]
        self._generators = {rank.rank for rank in step.header.ranks if "generator" in rank.roles}
        self._spans: dict[int, tuple[int, int]] = {}  # phase -> its command from the first to the last rank
        self._executed: dict[int, set[int]] = self._phases_executed(step)

    def waiting(self, rank: int) -> list[LanePiece]:
        """The pieces in which a rank waited, and for what."""
        found: list[LanePiece] = []
        for start, end in _gaps(self.busy.get(rank, []), self._length):
            found += self._causes(rank, start, end)
        return found

    def pipeline(self) -> list[LanePiece]:
        """What rank 0's pipeline waited for, piece by piece over the whole step."""
        return [(start, end, _named(what)) for start, end, what in self._phases]

    def _causes(self, rank: int, start: int, end: int) -> Iterator[LanePiece]:
        """The causes of one gap, piece by piece."""
        starts = self._starts
        place = max(0, bisect_right(starts, start) - 1)
        while place < len(self._phases) and self._phases[place][0] < end:
            begin, until, what = self._phases[place]
            begin, until = max(begin, start), min(until, end)
            parts: tuple[LanePiece, ...]
            if place in self._executed.get(rank, ()):
                # Before the first rank begins and after the last one ends, messages are on their way.
                first, last = (min(max(time, begin), until) for time in self._spans[place])
                parts = (
                    (begin, first, CONTROLLER),
                    (first, last, f"slower ranks in {activity_of(what)}"),
                    (last, until, CONTROLLER),
                )
            else:
                generates = what == GENERATION and rank in self._generators
                parts = ((begin, until, SLOWER_REPLICAS if generates else _named(what)),)
            yield from (part for part in parts if part[0] < part[1])
            place += 1

    def _phases_executed(self, step: StepTimeline) -> dict[int, set[int]]:
        """Rank -> the phases in which it executed the command that the pipeline waited for. Fills self._spans."""
        found: dict[int, set[int]] = {}
        for command in step.commands:
            place = max(0, bisect_right(self._starts, command.start) - 1)
            end = command.start + command.duration
            while place < len(self._phases) and self._phases[place][0] < end:
                if self._phases[place][2] == command.name and self._phases[place][1] > command.start:
                    found.setdefault(command.rank, set()).add(place)
                    first, last = self._spans.get(place, (command.start, end))
                    self._spans[place] = min(first, command.start), max(last, end)
                place += 1
        return found


def _named(phase: str) -> str:
    return phase if phase in (GENERATION, REWARDS, ENVIRONMENTS, SCHEDULING, CONTROLLER) else activity_of(phase)


def role_shares(step: StepTimeline, activity: RankActivity | None = None) -> list[RoleShares]:
    """What the ranks with equal roles did and waited for, in the order of their first rank."""
    activity = activity or RankActivity(step)
    by_roles: dict[tuple[str, ...], list[int]] = {}
    for rank in step.header.ranks:
        by_roles.setdefault(tuple(rank.roles), []).append(rank.rank)
    found = []
    for roles, ranks in by_roles.items():
        if roles == ("controller",):
            continue
        shares = RoleShares(roles, len(ranks))
        busy = _total(piece for rank in ranks for piece in activity.busy.get(rank, []))
        waiting = _total(piece for rank in ranks for piece in activity.waiting(rank))
        shares.busy, shares.waiting = (
            {what: microseconds / len(ranks) / 1e6 for what, microseconds in total.most_common()}
            for total in (busy, waiting)
        )
        found.append(shares)
    return found


def _total(pieces: Iterable[LanePiece]) -> Counter[str]:
    total: Counter[str] = Counter()
    for start, end, what in pieces:
        total[what] += end - start
    return total


def _busy(step: StepTimeline) -> dict[int, list[LanePiece]]:
    """Rank -> its busy pieces, disjoint and ascending. Commands come first: reward processes score beside them."""
    commands: dict[int, list[LanePiece]] = {}
    works: dict[int, dict[str, list[LanePiece]]] = {}
    for command in step.commands:
        piece = command.start, command.start + command.duration, activity_of(command.name)
        commands.setdefault(command.rank, []).append(piece)
    for chunk in step.chunks:
        commands.setdefault(chunk.rank, []).append((chunk.start, chunk.start + chunk.duration, DECODING))
    for work in step.works:
        what = WORKS.get(work.what, work.what)
        works.setdefault(work.rank, {}).setdefault(what, []).append((work.start, work.start + work.duration, what))
    busy = {}
    for rank in commands.keys() | works.keys():
        pieces = _joined(commands.get(rank, []), step.length)
        for of_kind in works.get(rank, {}).values():
            pieces = _filled(pieces, _joined(of_kind, step.length), step.length)
        busy[rank] = pieces
    return busy


def _joined(pieces: Iterable[LanePiece], length: int) -> list[LanePiece]:
    """The pieces within the step, disjoint and ascending: where two overlap, the earlier one counts."""
    found: list[LanePiece] = []
    for start, end, what in sorted(pieces):
        begin = max(start, 0, found[-1][1] if found else 0)
        if (until := min(end, length)) > begin:
            found.append((begin, until, what))
    return found


def _gaps(pieces: Sequence[LanePiece], length: int) -> Iterator[tuple[int, int]]:
    """The times between disjoint, ascending pieces."""
    begin = 0
    for start, end, _ in pieces:
        if start > begin:
            yield begin, start
        begin = end
    if begin < length:
        yield begin, length


def _filled(pieces: Sequence[LanePiece], others: Sequence[LanePiece], length: int) -> list[LanePiece]:
    """The pieces, and the parts of the others that lie in their gaps; both are disjoint and ascending."""
    found, place = list(pieces), 0
    for start, end in _gaps(pieces, length):
        while place < len(others) and others[place][1] <= start:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            found.append((max(others[at][0], start), min(others[at][1], end), others[at][2]))
            at += 1
    return sorted(found, key=itemgetter(0))


def _innermost(waits: Iterable[LanePiece], length: int) -> list[LanePiece]:
    """Disjoint phases that cover the step: in nested waits the inner one counts, between waits the controller works."""
    found: list[LanePiece] = []
    stack: list[LanePiece] = []
    now = 0

    def advance(until: int) -> None:
        nonlocal now
        until = min(until, length)
        if until > now:
            found.append((now, until, stack[-1][2] if stack else CONTROLLER))
            now = until

    for wait in sorted(waits, key=lambda wait: (wait[0], -wait[1])):
        while stack and stack[-1][1] <= wait[0]:
            advance(stack[-1][1])
            stack.pop()
        advance(wait[0])
        stack.append(wait)
    while stack:
        advance(stack[-1][1])
        stack.pop()
    advance(length)
    return found


def _refined(phases: Sequence[LanePiece], step: StepTimeline, length: int) -> list[LanePiece]:
    """The phases, with the collection of rollouts divided by what any rank did in it: decoding, else rewards, else
    environments, else only the scheduler."""
    decoding = [(chunk.start, chunk.start + chunk.duration, GENERATION) for chunk in step.chunks]
    doing = _union(decoding, length)
    for what in ("reward", "turn"):
        works = [(w.start, w.start + w.duration, WORKS[what]) for w in step.works if w.what == what]
        doing = _filled(doing, _union(works, length), length)
    doing = _filled(doing, [(0, length, SCHEDULING)], length)
    starts, found = [piece[0] for piece in doing], []
    for phase in phases:
        if phase[2] != "rollouts":
            found.append(phase)
            continue
        place = max(0, bisect_right(starts, phase[0]) - 1)
        while place < len(doing) and doing[place][0] < phase[1]:
            begin, until = max(doing[place][0], phase[0]), min(doing[place][1], phase[1])
            if begin < until:
                found.append((begin, until, doing[place][2]))
            place += 1
    return found


def _union(pieces: Iterable[LanePiece], length: int) -> list[LanePiece]:
    """The pieces of one kind, joined where they overlap or touch."""
    found: list[LanePiece] = []
    for start, end, what in _joined(pieces, length):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end, what
        else:
            found.append((start, end, what))
    return found
