"""The arithmetic of max_staleness: how far a rollout's weights may lag behind the weights it trains."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import groupby

from hpcrl.rollout.scheduling.groups import LiveGroup


@dataclass(frozen=True, slots=True)
class Due:
    """The groups `uids` of at least a certain age. Later batches have room for `later` of them; the rest is due in the
    next batch. `open` are the groups without a verdict."""

    uids: set[int]
    open: set[int]
    later: int

    @property
    def count(self) -> int:
        """Number of these groups that the next batch must take."""
        return max(0, len(self.uids) - self.later)

    def is_met(self, need: int) -> bool:
        """Whether a batch of `need` groups can take them."""
        return len(self.uids) - len(self.open) >= min(need, self.count)


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """Limit of max_staleness steps: no group is staler than ceil(max_staleness), and at most a share of max_staleness -
    floor(max_staleness) of a batch is staler than floor(max_staleness)."""

    max_staleness: float

    def ahead(self, need: int) -> int:
        """Useful number of groups beyond a batch of `need`: groups that can still be trained later."""
        return math.floor(self.max_staleness * need + 1e-9)

    def too_stale(self, groups: Iterable[LiveGroup], version: int, need: int) -> list[LiveGroup]:
        """The groups that no batch may take from now on; among equal ages the last ones."""
        room, old = self._tolerated(need), []
        for group in groups:
            staleness = version - group.version
            if staleness == self._whole + 1 and room > 0:
                room -= 1
            elif staleness > self._whole:
                old.append(group)
        return old

    def due(self, groups: Iterable[LiveGroup], still_open: Collection[int], version: int, need: int) -> list[Due]:
        """Groups from older weights that the batch of this version must take because they would become too old for all
        later batches: one entry for each age of which later batches cannot take all groups."""
        old = sorted((group for group in groups if group.version < version), key=lambda group: group.version)
        uids: set[int] = set()
        found = []
        for weights, members in groupby(old, key=lambda group: group.version):
            uids = uids | {group.uid for group in members}
            batches = self._whole - (version - weights)  # after this one that may take any number of them
            later = need * batches + self._tolerated(need) if batches >= 0 else 0
            if len(uids) > later:
                found.append(Due(uids, uids.intersection(still_open), later))
        return found

    @property
    def _whole(self) -> int:
        return math.floor(self.max_staleness)

    def _tolerated(self, need: int) -> int:
        """Number of groups of a batch that may lag one version more than whole steps allow."""
        return math.floor((self.max_staleness - self._whole) * need + 1e-9)
