"""Memory of the ranks that serve models to rewards.

A judge rank is a generator rank with the judge's model and keys, which never releases its weights and cache. A
reward-model rank holds a decoder's weights with a head of one row, and the memory of a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpcrl.config import Config, Problem
from hpcrl.config.judging import as_judges
from hpcrl.models.families import shape_of
from hpcrl.models.shape import ModelShape, Parameter
from hpcrl.planner.generator import check_engine_sizes, generator_parts, prefill_width
from hpcrl.planner.memory_parts import BYTES, PHASES, Part, has_gpus


def judge_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Memory parts of a judge rank. `shape` is the policy model's. CannotPlanError if judge.path cannot be read."""
    own = shape_of(config.judge.path, "judge.path")
    parts = generator_parts(config.of_judge(), own, PHASES, PHASES, has_gpus(config, ("judge",)))
    return [replace(part, role="judge") for part in parts]


def check_judge_sizes(config: Config) -> Iterator[Problem]:
    """Problems that the judge's engine reports for its model. CannotPlanError as above."""
    own = shape_of(config.judge.path, "judge.path")
    yield from map(as_judges, check_engine_sizes(config.of_judge(), own))


def reward_model_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Memory parts of a rank. `shape` is the policy model's. CannotPlanError if reward_model.path cannot be read."""
    own = config.reward_model
    shape = shape_of(own.path, "reward_model.path")
    body = tuple(p for p in shape.parameters if not p.name.startswith("lm_head."))
    shape = replace(shape, parameters=(*body, Parameter("score.weight", (1, shape.hidden_size), "whole")))
    forward = max(own.max_tokens, own.max_tokens_per_batch) * prefill_width(shape) * BYTES[own.dtype]
    return [
        Part("reward_model", "weights", shape.num_parameters * BYTES[own.dtype]),
        Part("reward_model", "forward", forward, ("generate",)),
    ]
