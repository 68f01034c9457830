"""Runs that learn from rewards by an objective of their pipeline (PipelineSpec.objective), without an algorithm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hpcrl.spec.problems import Path
from hpcrl.spec.table import SpecError
from hpcrl.spec.tables import PIPELINES

SECTIONS = ("algorithm", "loss", "imitation")
"""Sections that have their defaults in such a run."""


def without_algorithm(data: dict[str, Any]) -> dict[str, Any]:
    """The unchecked values of such a run without SECTIONS. Values of other runs are unchanged."""
    pipeline = data.get("pipeline")
    if isinstance(pipeline, str):
        with contextlib.suppress(SpecError):  # reported as an unknown pipeline
            spec = PIPELINES[pipeline]
            if spec.objective and spec.learns_from_rewards:
                return {name: value for name, value in data.items() if name not in SECTIONS}
    return data


def unread_with_objective(config: Any) -> Iterator[tuple[Path, Path, str]]:
    """(prefix of unread keys, key whose value is the cause, reason) in such a run."""
    for section in SECTIONS:
        yield (section,), ("pipeline",), f"the {config.pipeline} pipeline has a loss of its own"
    text = f"the {config.pipeline} pipeline does not compare trainer and generator"
    yield ("trainer", "max_mismatch"), ("pipeline",), text
