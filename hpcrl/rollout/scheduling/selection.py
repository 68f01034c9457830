"""Selection of the batch: which valid groups it contains, and for which groups it waits.

The first valid groups form the batch, with two exceptions. Groups that would become too old for every later batch are
due in this one (staleness.py); a limit on running groups would not suffice, since whole batches overtake a long
response. Prompts that were dropped max_attempts times are overdue. The batch waits for them once they fill a batch, or
once one was dropped PATIENCE times as often; otherwise long responses would starve.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from hpcrl.rollout.scheduling.groups import LiveGroup
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.staleness import Due, StalenessBound

PATIENCE = 4
"""Multiple of max_attempts after which the batch waits for a single dropped prompt."""


class Selection:
    """The batch being formed. `valid` has the groups that wait to be taken, by uid, in order of acceptance."""

    def __init__(self, config: SchedulerConfig):
        self._fresh = StalenessBound(0.0 if config.deterministic else config.max_staleness)
        self._waits = config.on_stale == "wait" and self.generates_ahead
        # In deterministic mode batches are in order of uid, so no prompt starves.
        self._max_dropped = None if config.deterministic else config.max_attempts
        self.version = -1  # trained by the batch
        self.need, self.is_closed = 0, True  # closed: between take_batch() and open()
        self.valid: dict[int, LiveGroup] = {}
        self._overdue: dict[int, LiveGroup] = {}  # started, no verdict yet
        self._due: list[Due] = []

    @property
    def generates_ahead(self) -> bool:
        """Whether groups may be trained in a later step than the one in which they start."""
        return self._fresh.max_staleness > 0

    @property
    def is_full(self) -> bool:
        """Whether there are enough valid groups for the batch."""
        return len(self.valid) >= self.need

    @property
    def worth_having(self) -> int:
        """Useful number of valid groups: this step's groups and groups that may be trained later."""
        return self._fresh.ahead(self.need) + (0 if self.is_closed else self.need)

    def open(self, version: int, need: int) -> None:
        self.version, self.need, self.is_closed = version, need, False

    def too_stale(self, started: Mapping[int, LiveGroup]) -> list[LiveGroup]:
        """The valid or started groups that no batch may take from now on; with on_stale=wait, only redundant ones."""
        return self._fresh.too_stale(self._all(started), self.version, self.need)

    def find_due(self, started: Mapping[int, LiveGroup]) -> None:
        """Determine the groups for which this batch waits, since later batches have no room for them."""
        if self._waits:
            self._due = self._fresh.due(self._all(started), started, self.version, self.need)

    def expect(self, group: LiveGroup) -> None:
        if self._is_overdue(group):
            self._overdue[group.uid] = group

    def accept(self, group: LiveGroup) -> None:
        """Record that the group is valid and waits to be taken."""
        self.valid[group.uid] = group
        self._overdue.pop(group.uid, None)
        for due in self._due:
            due.open.discard(group.uid)

    def remove(self, group: LiveGroup) -> None:
        """Remove a group that no batch will contain."""
        self.valid.pop(group.uid, None)
        self._overdue.pop(group.uid, None)
        for due in self._due:
            due.uids.discard(group.uid)
            due.open.discard(group.uid)

    def is_ready(self) -> bool:
        """Whether take_batch() would return a batch."""
        if self.is_closed or not self.is_full or self._awaits_overdue():
            return False
        return all(due.is_met(self.need) for due in self._due)

    def pick(self) -> list[LiveGroup]:
        """The `need` groups to train: the oldest as far as due; then overdue prompts, most often dropped first; then
        the oldest."""
        oldest = sorted(self.valid.values(), key=lambda group: group.version)
        due = max((due.count for due in self._due), default=0)
        others = sorted(oldest[due:], key=lambda group: -group.num_dropped if self._is_overdue(group) else 0)
        return (oldest[:due] + others)[: self.need]

    def take_batch(self) -> list[LiveGroup]:
        """Close the batch; its groups in order of uid. ValueError before is_ready()."""
        if not self.is_ready():
            raise ValueError(f"take_batch() before ready(): {len(self.valid)} valid groups, {self.need} needed")
        picked = sorted(self.pick(), key=lambda group: group.uid)
        if old := self._fresh.too_stale(picked, self.version, self.need):
            raise AssertionError(
                f"the batch of version {self.version} would have groups of {old[0].version}: max_staleness"
            )
        for group in picked:
            del self.valid[group.uid]
        self.is_closed = True
        return picked

    def return_batch(self, groups: list[LiveGroup]) -> None:
        """Undo the take_batch() that returned these groups."""
        self.valid |= {group.uid: group for group in groups}
        self.is_closed = False

    def _all(self, started: Mapping[int, LiveGroup]) -> list[LiveGroup]:
        """Groups that wait to be taken, then started groups, in order of uid."""
        return [*self.valid.values(), *sorted(started.values(), key=lambda group: group.uid)]

    def _awaits_overdue(self) -> bool:
        """Whether the batch waits for an overdue started group. Waiting for each one would make every step as long as
        the longest response, so they accumulate until they fill a batch, or one was dropped far too often."""
        if not self._overdue or self._max_dropped is None:
            return False
        overdue = [*chain(self._overdue.values(), filter(self._is_overdue, self.valid.values()))]
        patience = PATIENCE * self._max_dropped
        return len(overdue) >= self.need or any(group.num_dropped >= patience for group in overdue)

    def _is_overdue(self, group: LiveGroup) -> bool:
        return self._max_dropped is not None and group.num_dropped >= self._max_dropped
