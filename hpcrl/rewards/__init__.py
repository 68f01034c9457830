"""Rewards by name. Add one: a file here and a line in REWARDS; or give an import path (name=function)."""

from typing import Any

from hpcrl.config import RewardConfig
from hpcrl.rewards.base import Reward
from hpcrl.rewards.exact_match import ExactMatch
from hpcrl.rewards.fake import FakeReward
from hpcrl.rewards.function import FunctionReward
from hpcrl.rewards.math import MathReward
from hpcrl.rewards.reasoning_gym import ReasoningGym
from hpcrl.rewards.sort_digits import SortDigits

REWARDS: dict[str, type[Any]] = {
    "exact_match": ExactMatch,
    "math": MathReward,
    "reasoning_gym": ReasoningGym,
    "sort_digits": SortDigits,
    "fake": FakeReward,
    "function": FunctionReward,
}


def make_reward(config: RewardConfig) -> Reward:
    """The reward of a section of the configuration. ValueError when its options or its function do not fit."""
    return REWARDS[config.name](config)
