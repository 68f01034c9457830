"""The reward of prompts without a task, for pipelines that learn from a teacher."""

from __future__ import annotations

from hpcrl.config import RewardConfig
from hpcrl.rewards.reward import PerResponse, RewardItem, Score


class NoReward(PerResponse):
    """0 for every response; rows need no answer."""

    inline = True

    def __init__(self, config: RewardConfig):
        pass

    def score_one(self, item: RewardItem) -> Score:
        return Score(0.0, 0.0)
