"""Memory of judge ranks: that of a generator with the judge's model and keys, whose weights and cache always stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hpcrl.config import Config, Problem
from hpcrl.config.judging import as_judges
from hpcrl.planner.generator import check_engine_sizes, generator_parts
from hpcrl.planner.memory import has_gpus
from hpcrl.planner.memory_parts import PHASES, Part
from hpcrl.planner.shapes import CannotPlanError, ModelShape, read_shape


def judge_shape(config: Config) -> ModelShape:
    """The parameters of the judge. CannotPlanError if judge.path cannot be read."""
    path = Path(config.judge.path or "") / "config.json"
    try:
        return read_shape(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise CannotPlanError(f"judge.path: {path} cannot be read: {error}") from error


def judge_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Parts of a judge rank; shape: of the policy's model. CannotPlanError as above."""
    parts = generator_parts(config.of_judge(), judge_shape(config), PHASES, PHASES, has_gpus(config, ("judge",)))
    return [replace(part, role="judge") for part in parts]


def check_judge_sizes(config: Config) -> Iterator[Problem]:
    """What the judge's engine says of its model. CannotPlanError as above."""
    yield from map(as_judges, check_engine_sizes(config.of_judge(), judge_shape(config)))
