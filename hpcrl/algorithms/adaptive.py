"""Coefficients that are adapted after each step, to keep the KL or the entropy near a target.

KL (arXiv 1909.08593):       scale *= 1 + clip(KL / kl_target - 1, -.2, .2) min(responses / kl_horizon, 1)
entropy (arXiv 2505.22312):  c += entropy_coef_step if the entropy is below entropy_target, else c -= entropy_coef_step;
                             c is never below 0; the bonus has weight c after an entropy below the target, else 0

KL is the metric critic/kl, nats a token; both KL coefficients are multiplied by `scale`. Entropy is the metric
critic/entropy/mean. A step without model tokens to train on changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from hpcrl.algorithms.interface import Coefficients
from hpcrl.metrics.stats import Stat
from hpcrl.spec.policy_loss import PolicyLoss

KL_SCALE = "actor/kl_scale"
ENTROPY_COEF = "actor/entropy_coef"
ENTROPY_LEVEL = "_entropy_level"
"""The coefficient c, also in steps in which the bonus has weight 0."""
MAX_ERROR = 0.2


def adapted(config: PolicyLoss, coefficients: Coefficients, stats: Mapping[str, Stat]) -> dict[str, float]:
    """The coefficients for the next step, from this step's coefficients and statistics."""
    new = {name: coefficients[name] for name in (KL_SCALE, ENTROPY_COEF, ENTROPY_LEVEL) if name in coefficients}
    if config.kl_target is not None and (kl := _mean(stats, "critic/kl")) is not None:
        error = min(max(kl / config.kl_target - 1.0, -MAX_ERROR), MAX_ERROR)
        share = min(stats["critic/score/*"].count / config.kl_horizon, 1.0)  # else, huge steps make scale < 0
        new[KL_SCALE] = coefficients.get(KL_SCALE, 1.0) * (1.0 + error * share)
    if config.entropy_target is not None and (entropy := _mean(stats, "critic/entropy/mean")) is not None:
        below = entropy < config.entropy_target
        level = coefficients.get(ENTROPY_LEVEL, config.entropy_loss_coef)
        new[ENTROPY_LEVEL] = max(0.0, level + (config.entropy_coef_step if below else -config.entropy_coef_step))
        new[ENTROPY_COEF] = new[ENTROPY_LEVEL] if below else 0.0
    return new


def after_changes(coefficients: Coefficients, keys: Collection[str]) -> dict[str, float]:
    """The stored coefficients without those whose keys of the configuration have changed; these start again."""
    gone: set[str] = set()
    for beginning, own in (("algorithm.kl_", (KL_SCALE,)), ("algorithm.entropy_", (ENTROPY_COEF, ENTROPY_LEVEL))):
        if any(key.startswith(beginning) for key in keys):
            gone.update(own)
    return {name: value for name, value in coefficients.items() if name not in gone}


def _mean(stats: Mapping[str, Stat], name: str) -> float | None:
    """The mean; None if there is none or it is not finite, since it would remain in all later coefficients."""
    stat = stats.get(name)
    mean = stat.total / stat.count if stat is not None and stat.count else math.nan
    return mean if math.isfinite(mean) else None
