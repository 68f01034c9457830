"""A random reward, for debug=fake and for tests of the code around rewards."""

from __future__ import annotations

import hashlib
import time

from hpcrl.config import RewardConfig
from hpcrl.rewards.reward import PerResponse, RewardItem, Score
from hpcrl.rewards.spec import FakeOptions
from hpcrl.spec.options import read_options


class FakeReward(PerResponse):
    """1 or 0, a function of the sample id only."""

    pure = False

    def __init__(self, config: RewardConfig):
        self.options = read_options(FakeOptions, config.options)
        self.inline = self.options.latency_s == 0

    def score_one(self, item: RewardItem) -> Score:
        time.sleep(self.options.latency_s)
        digest = hashlib.blake2b(item.sample_id.to_bytes(8, "little"), digest_size=8).digest()
        hit = float(int.from_bytes(digest, "little") < self.options.pass_rate * 2.0**64)
        return Score(hit, hit)
