"""Memory of judge ranks: that of a generator with the judge's model and keys, whose weights and cache always stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpcrl.config import Config, Problem
from hpcrl.config.judging import as_judges
from hpcrl.planner.generator import check_engine_sizes, generator_parts
from hpcrl.planner.memory import has_gpus
from hpcrl.planner.memory_parts import PHASES, Part
from hpcrl.planner.shapes import ModelShape, shape_of


def judge_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Parts of a judge rank; shape: of the policy's model. CannotPlanError if judge.path cannot be read."""
    own = shape_of(config.judge.path, "judge.path")
    parts = generator_parts(config.of_judge(), own, PHASES, PHASES, has_gpus(config, ("judge",)))
    return [replace(part, role="judge") for part in parts]


def check_judge_sizes(config: Config) -> Iterator[Problem]:
    """What the judge's engine says of its model. CannotPlanError as above."""
    own = shape_of(config.judge.path, "judge.path")
    yield from map(as_judges, check_engine_sizes(config.of_judge(), own))
