"""The scheduler's settings, and which groups are worth training on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcrl.config import Config, RolloutConfig
from hpcrl.rollout.events import DoneSample


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's part of RolloutConfig, under the same names."""

    group_size: int
    over_sampling: int = 0
    max_attempts: int = 3
    max_lag: float = 0.0
    filter_mean_low: float | None = None
    filter_mean_high: float | None = None
    filter_std: bool = False
    max_generated_groups: int | None = None  # null: 20 x need
    siblings_together: bool = True
    deterministic: bool = False
    accept_errors: bool = False  # a group of errors counts with its rewards of 0 instead of starting anew

    @classmethod
    def of(cls, config: Config) -> SchedulerConfig:
        shared = {name: getattr(config.rollout, name) for name in cls.__slots__ if name in RolloutConfig.model_fields}
        return cls(**shared, deterministic=config.deterministic)


def rejecting_filter(samples: Sequence[DoneSample], config: SchedulerConfig) -> str:
    """Name of the filter that rejects a group (mean_low, mean_high, std), empty if none does.

    Kept are groups with low < mean score < high whose rewards, under filter_std, are not all equal: such a group has
    no advantage to learn from (DAPO's dynamic sampling, arXiv 2503.14476).
    """
    mean = sum(sample.score for sample in samples) / len(samples)
    if config.filter_mean_low is not None and mean <= config.filter_mean_low:
        return "mean_low"
    if config.filter_mean_high is not None and mean >= config.filter_mean_high:
        return "mean_high"
    same = len({sample.reward for sample in samples}) == 1
    return "std" if config.filter_std and same else ""
