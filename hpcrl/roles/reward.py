"""The reward role: responses come by mail, scores go to the controller; scoring happens in the pool's processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcrl.control.messages import Response, Scored, ScoredSample
from hpcrl.rewards.base import RewardItem
from hpcrl.rewards.pool import RewardPool

if TYPE_CHECKING:
    from hpcrl.roles.worker import Worker


class RewardRole:
    """Has no commands of its own."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._pool = RewardPool(worker.config)
        worker.world.mailbox.open()

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {}

    @property
    def busy(self) -> bool:
        return self._pool.pending > 0

    def look_after(self) -> bool:
        arrived = self._worker.world.mailbox.receive(Response)
        if arrived:
            self._pool.submit([_item(response) for response in arrived])
        scores = self._pool.poll()
        if scores:
            self._worker.emit(
                Scored([ScoredSample(i, float(s.reward), float(s.score), s.error, s.metrics) for i, s in scores])
            )
        return bool(arrived or scores)

    def close(self) -> None:
        self._pool.close()


def _item(response: Response) -> RewardItem:
    meta = json.loads(response.meta)
    return RewardItem(
        response.sample, response.domain, meta["prompt"], response.text, meta["answer"], meta["extra"], response.reason
    )
