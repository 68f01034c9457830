"""The reward role: receives responses, scores them in a pool of processes, and sends the scores to the controller."""

from __future__ import annotations

import json
import time
import weakref
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hpcrl.messaging.messages import AwaitGroup, DropAwaiting, Response, Scored, ScoredSample, ScoreGroup
from hpcrl.rewards.reward import RewardItem, Score
from hpcrl.rewards.seeing import why_judge_sees_nothing
from hpcrl.rewards.services import Services
from hpcrl.rewards.serving.pool import RewardPool
from hpcrl.rewards.serving.protocol import turns_of
from hpcrl.rollout.types import TOKEN_REWARD, is_validation
from hpcrl.spec.media import IMAGE_MARK, WRITTEN_MARK, Medium, by_picture
from hpcrl.workers.role import Rank

SCORES = 512
"""Maximum scores per message, so a message stays below the size limit even if all scores have token rewards."""


class RewardRole:
    """Scores each response on arrival. For a group reward, responses wait until the controller names their group,
    because only the controller tracks which attempts of a prompt are valid."""

    def __init__(self, worker: Rank):
        self._worker = worker
        rank, layout = worker.world.rank, worker.layout
        self._pool = RewardPool(
            worker.config, services=_services(worker), domain=layout.domain_of(rank), elsewhere=layout.scorers
        )
        self._arrived: list[RewardItem] = []  # waiting until their reward is loaded
        self._held: dict[int, RewardItem] = {}  # waiting for other group members
        self._started: dict[int, float] = {}  # by submitted sample
        self._images = weakref.WeakValueDictionary[tuple[bytes, int, int], Medium]()  # of responses without a score

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {ScoreGroup: self._score_together, DropAwaiting: self._drop}

    @property
    def busy(self) -> bool:
        return self._pool.pending > 0 or bool(self._arrived)

    def poll(self) -> bool:
        arrived = self._worker.world.mailbox.receive(Response)
        self._arrived += map(self._shared, map(item_of, arrived))
        self._sort()
        scores = self._pool.poll()
        for start in range(0, len(scores), SCORES):
            self._worker.emit(Scored([self._scored(*scored) for scored in scores[start : start + SCORES]]))
        return bool(arrived or scores)

    def _shared(self, item: RewardItem) -> RewardItem:
        """The item with the images that other items have: each response of a group brings its own copy."""
        images = [self._images.setdefault(image.identity, image) for image in item.images]
        return replace(item, images=images) if images else item

    def _sort(self) -> None:
        arrived, self._arrived = self._arrived, []
        waiting = []
        for item in arrived:
            match self._pool.scores(item.domain):
                case "samples":
                    self._started[item.sample_id] = time.monotonic()
                    self._pool.submit([item])
                case "groups":
                    self._held[item.sample_id] = item
                    waiting.append(item.sample_id)
                case None:
                    self._arrived.append(item)
        if waiting:
            self._worker.emit(AwaitGroup(waiting))

    def _score_together(self, command: ScoreGroup, seq: int) -> None:
        self._started |= dict.fromkeys(command.samples, time.monotonic())
        self._pool.submit_group([self._held.pop(sample) for sample in command.samples])

    def _drop(self, command: DropAwaiting, seq: int) -> None:
        for sample in command.samples:
            self._held.pop(sample, None)

    def close(self) -> None:
        self._pool.close()

    def _scored(self, sample: int, score: Score) -> ScoredSample:
        times = self._started.pop(sample, 0.0), time.monotonic()
        tokens = np.array(list(score.token_rewards.items()), dtype=TOKEN_REWARD)
        parts = list(score.turn_rewards), tokens.tobytes()
        extracted = score.extracted if is_validation(sample) else None
        result = float(score.reward), float(score.score), score.error, score.metrics
        return ScoredSample(sample, *result, *parts, extracted, *times)


def _services(worker: Rank) -> Services:
    config = worker.config
    models = {"judge": f"{config.judge.path} {config.judge.engine} {config.judge.dtype}"}
    seed = config.seed if config.deterministic else None
    seeing = ["judge"] if config.asks("judge") and not why_judge_sees_nothing(config) else []
    return Services(worker.services, models, worker.world.token, seed, seeing)


def item_of(response: Response) -> RewardItem:
    """The item to score for a response."""
    meta = json.loads(response.meta.replace(IMAGE_MARK.encode(), WRITTEN_MARK.encode()))
    return RewardItem(
        response.sample,
        response.domain,
        meta["prompt"],
        response.text,
        meta["answer"],
        meta["extra"],
        response.reason,
        array("i", response.token_ids),
        turns_of(response.earlier),
        meta.get("messages", ()),
        [picture[-1] for picture in by_picture(response.media)],
    )
