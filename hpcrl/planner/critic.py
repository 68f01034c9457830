"""Memory of critic ranks: that of a trainer with the critic's model and keys, a head of one row and no logits."""

from __future__ import annotations

from dataclasses import replace

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, Problem
from hpcrl.planner.memory_parts import PHASES, Part, Phase
from hpcrl.planner.shapes import ModelShape, Parameter, shape_of
from hpcrl.planner.trainer import train_plan

PHASE_OF: dict[Phase, Phase] = {"train": "critic", "update": "critic_update"}
"""Phase of a trainer -> that of the critic with the same work."""


def critic_shape(config: Config, policy: ModelShape) -> ModelShape:
    """The parameters of the critic; `policy`: of the policy's model. CannotPlanError if critic.path cannot be read."""
    shape = policy if config.critic.path is None else shape_of(config.critic.path, "critic.path")
    body = tuple(p for p in shape.parameters if not p.name.startswith("lm_head."))
    head = (Parameter("score.weight", (1, shape.hidden_size), "whole"), Parameter("score.bias", (1,), "whole"))
    return replace(shape, parameters=(*body, *head))


def critic_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Parts of the fullest critic rank; shape: of the policy's model. CannotPlanError for an engine without a plan."""
    own = config.of_critic()
    parts = train_plan(own).trainer_parts(own, critic_shape(config, shape), num_ranks)
    found = []
    for part in parts:
        during = part.during if part.during == PHASES else tuple(PHASE_OF[p] for p in part.during if p in PHASE_OF)
        if part.name != "logits" and during:
            found.append(replace(part, role="critic", during=during))
    return found


def check_critic(config: Config, layout: RoleLayout, shape: ModelShape) -> list[Problem]:
    """Problems of the critic's sizes with its model or its ranks. CannotPlanError as above."""
    own, sizes = config.of_critic(), critic_shape(config, shape)
    problems = train_plan(own).check(own, layout, sizes)
    if sizes.vocab_size < shape.vocab_size:
        text = (
            f"critic.path: {config.critic.path} has {sizes.vocab_size} tokens, the policy's model {shape.vocab_size}; "
            "give a model with the same tokenizer"
        )
        problems.append(Problem(("critic", "path"), text, (("model", "path"),)))
    return problems


def critic_checkpoint_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of weights and optimizer state in one checkpoint, for all ranks together. CannotPlanError as above."""
    own = config.of_critic()
    return train_plan(own).checkpoint_bytes(own, critic_shape(config, shape))
