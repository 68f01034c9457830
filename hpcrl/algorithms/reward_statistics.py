"""Mean and standard deviation of the rewards of all steps so far, per domain, as coefficients of the algorithm.

After each step its rewards' moments are merged into the previous moments (Chan, Golub and LeVeque 1979), and the step
is normalised by the result: ROLL's `running` (arXiv 2506.06122).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hpcrl.algorithms.interface import Coefficients, RewardTable
from hpcrl.metrics.stats import Stat, Stats, scalar

PREFIX = "_reward_moments/"


def running_moments(table: RewardTable, coefficients: Coefficients) -> tuple[tuple[Tensor, Tensor], Stats]:
    """((mean, standard deviation), statistics): float64 [N] each, of each row's domain with this step included. The
    statistics hold the merged moments, which `carried` reads; every rank computes equal values."""
    names, ids = table.domain_ids()
    means, stds = (torch.zeros(len(names), dtype=torch.float64) for _ in range(2))
    stats: Stats = {}
    for number, name in enumerate(names):
        rewards = table.rewards[ids == number].double()
        if not rewards.numel():
            continue
        keys = [f"{PREFIX}{part}/{name}" for part in ("count", "mean", "squares")]
        count, mean, squares = (coefficients.get(key, 0.0) for key in keys)
        new, own = rewards.numel(), rewards.mean().item()
        total = count + new
        squares += (rewards - own).square().sum().item() + (own - mean) ** 2 * count * new / total
        mean += (own - mean) * new / total
        means[number], stds[number] = mean, (squares / max(total - 1, 1)) ** 0.5
        stats |= {f"{key}^": scalar(value) for key, value in zip(keys, (total, mean, squares), strict=True)}
        domain = f"domain/{name}/" if name else ""
        stats[f"{domain}critic/running_mean"] = scalar(mean)
        stats[f"{domain}critic/running_std"] = scalar(stds[number].item())
    return (means[ids], stds[ids]), stats


def carried(coefficients: Coefficients, stats: Mapping[str, Stat]) -> dict[str, float]:
    """The moments for the next step: a domain without responses in this step keeps its moments."""
    before = {name: value for name, value in coefficients.items() if name.startswith(PREFIX)}
    return before | {name[:-1]: stat.high for name, stat in stats.items() if name.startswith(PREFIX)}
