"""Checks of the sections `loss` and `imitation`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from hpcrl.config.schema import Config
from hpcrl.spec.options import read_options
from hpcrl.spec.problems import Problem
from hpcrl.spec.tables import ENVS

EXPERT_TURNS = "imitation.expert_turns"


def check_loss_weights(config: Config) -> Iterator[Problem]:
    """Report weights with which a domain would learn nothing, or that nothing reads."""
    if not (config.learns_from_rewards and config.learns):
        return
    for domain, weights in config.loss.items():
        at, key = ("loss", domain), f"loss.{domain}"
        if weights.teach_nothing and not (config.expert_plays and config.envs):
            text = f"{key}: all weights are 0, so the domain would learn nothing; raise one, or leave its rows out"
            yield Problem(at, text)
        if weights.ce_above is not None and not weights.ce:
            text = f"{key}.ce_above: {weights.ce_above:g}, but {key}.ce is 0; raise it, or use ce_above=null"
            yield Problem((*at, "ce_above"), text, ((*at, "ce"),))
    yield from _objective(config)
    if config.expert_plays and not config.envs:
        text = f"{EXPERT_TURNS}: {config.imitation.expert_turns:g}, but the run has no environment, so no expert; give "
        text += f"env.default.name, or use {EXPERT_TURNS}=0"
        yield Problem(("imitation", "expert_turns"), text, (("env",),))


def expert_problems(config: Config, domains: Sequence[str]) -> Iterator[str]:
    """One line for each thing that keeps experts from playing turns of prompts of these domains, those of data.train:
    an environment without an expert, no environment at all, a domain that has neither an expert nor a weight. An
    environment of validation prompts needs no expert."""
    key = f"{EXPERT_TURNS}: {config.imitation.expert_turns:g}, but"
    names = dict.fromkeys(name if name in config.env else "default" for name in domains)
    playing = {name: env for name in names if (env := config.env_of(name)) is not None}
    if not playing:
        yield f"{key} no domain of data.train has an environment, so no expert; use {EXPERT_TURNS}=0"
    for name, env in playing.items():
        spec = ENVS[env.name]
        if not spec.has_expert:
            able = ", ".join(known for known, other in ENVS.items() if other.has_expert)
            yield f"{key} env.{name}.name={env.name} has no expert ({able} have one); use {EXPERT_TURNS}=0"
            continue
        assert spec.section is not None, "an expert is of an environment with typed options"
        with contextlib.suppress(ValueError):  # wrong options are reported as such
            if obstacle := spec.expert_obstacle(read_options(spec.section, env.options)):
                yield f"{key} the expert of env.{name} cannot play: {obstacle}; or use {EXPERT_TURNS}=0"
    for name in domains:
        if config.env_of(name) is None and config.loss_of(name).teach_nothing:
            section = name if name in config.loss else "default"
            yield (
                f"loss.{section}: all weights are 0, and domain {name} has no environment, so no expert's turns: it "
                "would learn nothing; raise one, or leave its rows out"
            )


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
