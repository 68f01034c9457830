"""Checks of the sections `loss` and `imitation`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hpcrl.config.schema import Config
from hpcrl.spec.options import read_options
from hpcrl.spec.problems import Problem
from hpcrl.spec.tables import ENVS


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
    if config.expert_plays:
        yield from _expert_turns(config)


def _expert_turns(config: Config) -> Iterator[Problem]:
    """Report an environment without an expert, and a run without environments."""
    at, key, share = ("imitation", "expert_turns"), "imitation.expert_turns", config.imitation.expert_turns
    if not config.envs:
        text = f"{key}: {share:g}, but the run has no environment, so no expert; give env.default.name, or use {key}=0"
        yield Problem(at, text, (("env",),))
    for domain, env in config.envs.items():
        spec, name = ENVS[env.name], f"env.{domain}"
        if not spec.has_expert:
            able = ", ".join(known for known, other in ENVS.items() if other.has_expert)
            text = f"{key}: {share:g}, but {name}.name={env.name} has no expert ({able} have one); use {key}=0"
            yield Problem(at, text, (("env", domain, "name"),))
            continue
        assert spec.section is not None, "an expert is of an environment with typed options"
        with contextlib.suppress(ValueError):  # wrong options are reported as such
            if obstacle := spec.expert_obstacle(read_options(spec.section, env.options)):
                text = f"{key}: {share:g}, but the expert of {name} cannot play: {obstacle}; or use {key}=0"
                yield Problem(at, text, (("env", domain),))


def _objective(config: Config) -> Iterator[Problem]:
    """Report an objective that reads no weights, and terms of the policy loss that no domain has."""
    if not config.algorithm_spec.reads_weights:
        name = getattr(config.algorithm, "advantage_estimator", "the algorithm")
        imitates = config.imitates or config.expert_plays
        for section in [key for key, is_read in (("loss", config.weighs_losses), ("imitation", imitates)) if is_read]:
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
