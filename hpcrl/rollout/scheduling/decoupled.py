"""The decoupled rewards of a group (GDPO, arXiv 2601.05242): each part of a reward is normalised over the group alone.

d_i = sum over parts k of w_k (r_ik - mean of k) / (std of k + eps), with the sample standard deviation over the group;
a part without spread adds 0. What a reward has beside its weighted parts, such as the reward of an environment, is one
more part of weight 1; a reward without parts is one part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from hpcrl.config import Config
from hpcrl.rollout.scheduling.events import DoneSample

DEGENERATE_STD = 1e-6
"""A part with at most this standard deviation has no spread, as in hpcrl.algorithms.functional."""
ROUNDING = 1e-9
"""Share of the weighted parts below which the rest of a reward is rounding."""


@dataclass(frozen=True, slots=True)
class Decoupling:
    """eps: added to standard deviations. weights_of: domain -> weight of each part of its reward, by the metric in
    which the reward tells the part."""

    eps: float
    weights_of: Callable[[str], Mapping[str, float]]

    @classmethod
    def of(cls, config: Config) -> Decoupling | None:
        """None if the algorithm does not read decoupled rewards."""
        return None if config.decoupling_eps is None else cls(config.decoupling_eps, cache(config.part_weights))

    def rewards(self, domain: str, samples: Sequence[DoneSample]) -> list[float]:
        """The decoupled rewards of a group. Failed episodes have 0 and do not count; a response whose reward raised an
        error has 0 in every part."""
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
        """Each column over the kept rows; 0 elsewhere."""
        normalized = np.zeros_like(columns)
        if kept.sum() > 1:
            spread = columns[kept].std(axis=0, ddof=1)
            centred = (columns - columns[kept].mean(axis=0)) / np.where(spread > DEGENERATE_STD, spread + self.eps, 1.0)
            normalized[kept] = np.where(spread > DEGENERATE_STD, centred, 0.0)[kept]
        return normalized
