"""A reward by lot, for runs whose responses are worth none (debug=fake) and for trials of what drives rewards."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from hpcrl.config import NonNegative, RewardConfig, Section, Share
from hpcrl.rewards.base import Reward, RewardItem, Score
from hpcrl.spec.options import read_options


class Options(Section):
    """`pass_rate`: share of responses with reward 1. `latency_s`: seconds that scoring one takes."""

    pass_rate: Share = 0.5
    latency_s: NonNegative = 0.0


class FakeReward(Reward):
    """1 or 0, a function of the sample's id alone."""

    def __init__(self, config: RewardConfig):
        self.options = read_options(Options, config.options)
        self.inline = self.options.latency_s == 0

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self._score(item) for item in items]

    def _score(self, item: RewardItem) -> Score:
        time.sleep(self.options.latency_s)
        digest = hashlib.blake2b(item.sample_id.to_bytes(8, "little"), digest_size=8).digest()
        hit = float(int.from_bytes(digest, "little") < self.options.pass_rate * 2.0**64)
        return Score(hit, hit)
