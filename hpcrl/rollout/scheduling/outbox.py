"""Commands on their way out of the scheduler."""

from __future__ import annotations

from collections.abc import Container

from hpcrl.rollout.scheduling.events import Continue, Drop, Generate, SchedulerCommand, SendToScorer


class Outbox:
    """Orders since the last take(), by kind and replica."""

    def __init__(self) -> None:
        self._orders: dict[type, dict[int, list[int]]] = {}

    def put(self, kind: type, replica: int, sample_id: int) -> None:
        self._orders.setdefault(kind, {}).setdefault(replica, []).append(sample_id)

    def take(self, replicas: Container[int], living: Container[int]) -> list[SchedulerCommand]:
        """The commands, Drops first, without outdated ones: to lost replicas, for dropped samples (or Drops of living
        ones)."""
        orders, self._orders = self._orders, {}
        return [
            kind(name, kept)
            for kind in (Drop, SendToScorer, Continue, Generate)
            for name, ids in sorted(orders.get(kind, {}).items())
            if name in replicas and (kept := tuple(i for i in ids if (i in living) != (kind is Drop)))
        ]
