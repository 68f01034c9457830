"""The reward of responses that nothing judges."""

from __future__ import annotations

from hpcrl.config import RewardConfig
from hpcrl.rewards.reward import PerResponse, RewardItem, Score


class Unscored(PerResponse):
    """0 for every response."""

    inline = True

    def __init__(self, config: RewardConfig):
        pass

    def score_one(self, item: RewardItem) -> Score:
        return Score(0.0, 0.0)
