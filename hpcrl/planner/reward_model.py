"""Memory of reward-model ranks: the weights of a decoder with a head of one row, and a forward pass."""

from __future__ import annotations

from dataclasses import replace

from hpcrl.config import Config
from hpcrl.planner.generator import prefill_width
from hpcrl.planner.memory_parts import BYTES, Part
from hpcrl.planner.shapes import ModelShape, Parameter, shape_of


def reward_model_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Parts of a rank; shape: of the policy's model. CannotPlanError if reward_model.path cannot be read."""
    own = config.reward_model
    shape = shape_of(own.path, "reward_model.path")
    body = tuple(p for p in shape.parameters if not p.name.startswith("lm_head."))
    shape = replace(shape, parameters=(*body, Parameter("score.weight", (1, shape.hidden_size), "whole")))
    forward = max(own.max_tokens, own.max_tokens_per_batch) * prefill_width(shape) * BYTES[own.dtype]
    return [
        Part("reward_model", "weights", shape.num_parameters * BYTES[own.dtype]),
        Part("reward_model", "forward", forward, ("generate",)),
    ]
