"""Checks of the section `loss`."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.schema import Config
from hpcrl.spec.problems import Problem


def check_loss_weights(config: Config) -> Iterator[Problem]:
    """Report weights with which a domain would learn nothing, or that nothing reads."""
    if not (config.learns_from_rewards and config.learns):
        return
    for domain, weights in config.loss.items():
        at, key = ("loss", domain), f"loss.{domain}"
        if not (weights.policy or weights.ce or weights.divergence):
            text = f"{key}: all weights are 0, so the domain would learn nothing; raise one, or leave its rows out"
            yield Problem(at, text)
        if weights.ce_above is not None and not weights.ce:
            text = f"{key}.ce_above: {weights.ce_above:g}, but {key}.ce is 0; raise it, or use ce_above=null"
            yield Problem((*at, "ce_above"), text, ((*at, "ce"),))
    yield from _objective(config)


def _objective(config: Config) -> Iterator[Problem]:
    """Report an objective that reads no weights, and terms of the policy loss that no domain has."""
    if not config.algorithm_spec.reads_weights:
        name = getattr(config.algorithm, "advantage_estimator", "the algorithm")
        for section in [
            key for key, is_read in (("loss", config.weighs_losses), ("imitation", config.imitates)) if is_read
        ]:
            text = f"{section}: {name} has an objective of its own, which reads no weights; leave the section out"
            yield Problem((section,), text, (("algorithm",),))
    if not config.weighs_losses:
        return
    if config.has_policy_loss:
        return
    for name in ("kl_loss_coef", "kl_reward_coef", "entropy_loss_coef"):
        if value := getattr(config.algorithm, name):
            path = ("algorithm", name)
            text = f"algorithm.{name}: {value:g} is a part of the policy loss, whose weight is 0 in every domain; use 0"
            yield Problem(path, text, (("loss",),))
