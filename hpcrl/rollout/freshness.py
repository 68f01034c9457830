"""How far the weights of a rollout may be behind those that it trains: the arithmetic of max_lag."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hpcrl.rollout.groups import LiveGroup


@dataclass(frozen=True, slots=True)
class Freshness:
    """max_lag steps: no group further behind than ceil(max_lag), and at most the share max_lag - floor(max_lag) of a
    batch further than floor(max_lag)."""

    max_lag: float

    def ahead(self, need: int) -> int:
        """Groups worth having beyond a batch of `need`: those that can still be trained later."""
        return math.floor(self.max_lag * need + 1e-9)

    def too_old(self, groups: Iterable[LiveGroup], version: int, need: int) -> list[LiveGroup]:
        """The groups that no batch may take from now on, of equals those that come last."""
        room, old = self._tolerated(need), []
        for group in groups:
            lag = version - group.version
            if lag == self._whole + 1 and room > 0:
                room -= 1
            elif lag > self._whole:
                old.append(group)
        return old

    def last_chances(self, groups: Iterable[LiveGroup], version: int, need: int) -> set[int]:
        """Uids of the groups that would be too old for the batch after this one."""
        old = sorted(
            (group for group in groups if version - group.version >= self._whole),
            key=lambda group: (group.version, group.uid),
        )
        youngest = sum(version - group.version == self._whole for group in old)
        return {group.uid for group in old[: len(old) - min(self._tolerated(need), youngest)]}

    @property
    def _whole(self) -> int:
        return math.floor(self.max_lag)

    def _tolerated(self, need: int) -> int:
        """Groups of a batch that may be one version further behind than whole steps allow."""
        return math.floor((self.max_lag - self._whole) * need + 1e-9)
