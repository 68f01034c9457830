"""The scheduler's settings, group filters, expected response lengths, and decoupled rewards.

Decoupled rewards (GDPO, arXiv 2601.05242) normalise each part of a reward over its group only:
d_i = sum over parts k of w_k (r_ik - mean of k) / (std of k + eps), with the sample standard deviation over the group;
a part without spread adds 0. The rest of a reward, such as an environment's reward, is one more part of weight 1; a
reward without parts is one part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import numpy as np

from hpcrl.config import Config, DomainRolloutConfig, RolloutConfig
from hpcrl.rollout.scheduling.events import DoneSample

MEMORY = 0.05
"""Weight of a new length in the mean of its class."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's part of RolloutConfig, under the same names."""

    group_size: int
    extra_prompts: int = 0
    extra_members: int = 0
    max_attempts: int = 3
    restart_failed_episodes: bool = False
    max_staleness: float = 0.0
    on_stale: Literal["wait", "cancel"] = "wait"
    on_new_weights: Literal["continue", "recompute", "restart"] = "continue"
    filter_mean_low: float | None = None
    filter_mean_high: float | None = None
    filter_std: bool = False
    domains: Mapping[str, DomainRolloutConfig] = field(default_factory=dict)
    max_generated_groups: int | None = None  # null: 20 x need
    group_affinity: bool = True
    prompt_affinity: bool = False
    routing: Literal["count", "expected_length"] = "count"
    min_replicas: int = 1
    speed_aware_routing: bool = True
    deterministic: bool = False
    accept_errors: bool = False  # a group of only errors counts, with rewards of 0, instead of restarting
    greedy_baseline: bool = False  # one more response per prompt, decoded greedily
    decoupling: Decoupling | None = None

    @classmethod
    def of(cls, config: Config) -> SchedulerConfig:
        shared = {name: getattr(config.rollout, name) for name in cls.__slots__ if name in RolloutConfig.model_fields}
        greedy, decoupling = config.algorithm_spec.greedy_baseline, Decoupling.of(config)
        return cls(**shared, deterministic=config.deterministic, greedy_baseline=greedy, decoupling=decoupling)

    def of_domain(self, domain: str) -> SchedulerConfig:
        """The settings for prompts of a domain, which may have its own filters."""
        if (own := self.domains.get(domain)) is None:
            return self
        given = own.model_dump(include=set(self.__slots__), exclude_none=True)
        return replace(self, **given)

    @property
    def num_members(self) -> int:
        """Number of responses sampled for a prompt."""
        return self.group_size + self.extra_members


def rejecting_filter(
    samples: Sequence[DoneSample], config: SchedulerConfig, baseline: float | None = None, domain: str = ""
) -> str:
    """Name of the filter that rejects a group of a domain (mean_low, mean_high, std), empty if none does.

    Groups pass with low < mean score < high and, under filter_std, rewards that are not all equal, since equal rewards
    give no advantage (DAPO's dynamic sampling, arXiv 2503.14476). With a baseline, equal rewards pass if they differ
    from it. Decoupled rewards pass if a part differs. Failed episodes do not count.
    """
    samples = [sample for sample in samples if not sample.failed] or samples
    mean = sum(sample.score for sample in samples) / len(samples)
    if config.filter_mean_low is not None and mean <= config.filter_mean_low:
        return "mean_low"
    if config.filter_mean_high is not None and mean >= config.filter_mean_high:
        return "mean_high"
    if config.decoupling is not None:
        same = not any(config.decoupling.rewards(domain, samples))
    else:
        same = len({sample.reward for sample in samples} | ({baseline} - {None})) == 1
    return "std" if config.filter_std and same else ""


class Lengths:
    """Mean response lengths by class of prompt (its domain); recent lengths count more."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._mean = 0.0

    def observe(self, kind: str, length: int) -> None:
        """Add the length of a response of this class, in tokens."""
        self._means[kind] = _blend(self._means.get(kind), length)
        self._mean = _blend(self._mean or None, length)

    def expected(self, kind: str) -> float:
        """Expected length of a response of this class, in units of the overall mean; 1 without data."""
        return self._means[kind] / self._mean if kind in self._means and self._mean > 0 else 1.0


def _blend(mean: float | None, value: float) -> float:
    return value if mean is None else mean + MEMORY * (value - mean)


DEGENERATE_STD = 1e-6
"""A part with at most this standard deviation has no spread, as in hpcrl.algorithms.functional."""
ROUNDING = 1e-9
"""Fraction of the weighted parts below which the rest of a reward is a rounding error."""


@dataclass(frozen=True, slots=True)
class Decoupling:
    """`eps` is added to standard deviations. `weights_of` maps a domain to the weight of each part of its reward, by
    the metric that reports the part."""

    eps: float
    weights_of: Callable[[str], Mapping[str, float]]

    @classmethod
    def of(cls, config: Config) -> Decoupling | None:
        """None if the algorithm does not read decoupled rewards."""
        return None if config.decoupling_eps is None else cls(config.decoupling_eps, cache(config.part_weights))

    def rewards(self, domain: str, samples: Sequence[DoneSample]) -> list[float]:
        """A group's decoupled rewards. Failed episodes have 0 and do not count; a reward's error zeroes all parts."""
        weights = self.weights_of(domain)
        given = [{} if sample.error else sample.metrics for sample in samples]
        parts = np.array([[metrics.get(name, 0.0) for name in weights] for metrics in given], dtype=float)
        weighted = parts * np.array(list(weights.values()))
        rest = np.array([sample.reward for sample in samples]) - weighted.sum(1)
        rest[abs(rest) <= ROUNDING * abs(weighted).sum(1)] = 0.0
        kept = np.array([not sample.failed for sample in samples])
        columns = np.column_stack([parts, rest])
        decoupled = self._normalized(columns, kept) @ np.array([*weights.values(), 1.0])
        return [float(number) for number in decoupled]

    def _normalized(self, columns: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Each column normalised over the kept rows; 0 in other rows."""
        normalized = np.zeros_like(columns)
        if kept.sum() > 1:
            spread = columns[kept].std(axis=0, ddof=1)
            centred = (columns - columns[kept].mean(axis=0)) / np.where(spread > DEGENERATE_STD, spread + self.eps, 1.0)
            normalized[kept] = np.where(spread > DEGENERATE_STD, centred, 0.0)[kept]
        return normalized
