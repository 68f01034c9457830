"""The score of a reward model with a scalar head, which ranks of the run serve (the role reward_model)."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hpcrl.config import RewardConfig
from hpcrl.rewards.reward import Reward, RewardItem, Score
from hpcrl.rewards.services import NOBODY, Services
from hpcrl.rewards.serving.endpoint import Endpoint, EndpointError
from hpcrl.rewards.serving.guarded import failed
from hpcrl.rewards.spec import RewardModelOptions
from hpcrl.spec.options import read_options

ROLE = "reward_model"
SHARE = 0.9
"""Share of reward.*.timeout_s after which a request is abandoned."""


class RewardModelReward(Reward):
    """The reward is the model's score of the whole dialogue, shifted and scaled, or its sigmoid; the score is 1 if the
    reward is at least `threshold`. The metric `raw` is the model's score, and
    `head/NAME` the value of each of several heads. A worker process has up to
    reward.*.concurrency open requests, and a rank scores requests that arrive together in one forward pass."""

    pool = "async"

    def __init__(self, config: RewardConfig):
        self.options = read_options(RewardModelOptions, config.options)
        self._timeout_s, self._services = SHARE * config.timeout_s, NOBODY
        self._threads = ThreadPoolExecutor(config.concurrency, ROLE)
        self._endpoint: Endpoint | None = None

    def connect(self, services: Services) -> None:
        """See Reward."""
        self._services = services

    def start(self) -> None:
        """See Reward."""
        self._endpoint = Endpoint(
            [f"{url}/score" for url in self._services.of(ROLE)],
            timeout_s=self.options.request_timeout_s,
            backoff_s=self.options.backoff_s,
            token=self._services.token,
        )

    async def score(self, items: Sequence[RewardItem]) -> list[Score]:
        loop = asyncio.get_running_loop()
        asked = [loop.run_in_executor(self._threads, self._ask, item) for item in items]
        return list(await asyncio.gather(*asked))

    def _ask(self, item: RewardItem) -> Score:
        assert self._endpoint is not None, "started before the first response"
        counts: Counter[str] = Counter()
        try:
            asked = {"messages": dialogue(item)}
            answer = json.loads(self._endpoint.ask(asked, time.monotonic() + self._timeout_s, counts))
            raw, heads = float(answer["score"]), {f"head/{name}": float(x) for name, x in answer["heads"].items()}
        except EndpointError as error:
            return failed(str(error))
        options = self.options
        reward = (raw - options.shift) * options.scale
        if options.sigmoid:
            reward = 0.5 * (1 + math.tanh(reward / 2))  # without overflow
        metrics = {"raw": raw, **heads, "requests": float(counts["requests"]), "retries": float(counts["retries"])}
        return Score(reward, float(reward >= options.threshold), metrics=metrics)


def dialogue(item: RewardItem) -> list[dict[str, Any]]:
    """The messages of an episode, or else the prompt's messages and the response."""
    whole = item.extra.get("messages")  # a column of the row may have this name
    if item.earlier and isinstance(whole, list):
        return list(whole)
    asked = [dict(message) for message in item.messages] or [{"role": "user", "content": item.prompt}]
    return [*asked, {"role": "assistant", "content": item.response}]
