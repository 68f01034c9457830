"""The reward for the built-in task sort_digits."""

from __future__ import annotations

from hpcrl.config import RewardConfig
from hpcrl.rewards.reward import PerResponse, RewardItem, Score
from hpcrl.rewards.spec import SortDigitsOptions
from hpcrl.spec.options import read_options


class SortDigitsReward(PerResponse):
    """Score 1 if the response is exactly the sorted line; the reward is the score, or partial credit."""

    inline = True

    def __init__(self, config: RewardConfig):
        self.options = read_options(SortDigitsOptions, config.options)

    def score_one(self, item: RewardItem) -> Score:
        if item.response.strip() == item.answer:
            return Score(1.0, 1.0)
        given, wanted = item.response.split(), str(item.answer).split()
        right = sum(a == b for a, b in zip(given, wanted, strict=False))
        return Score(self.options.partial * right / max(len(given), len(wanted), 1), 0.0)
