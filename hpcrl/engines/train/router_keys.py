"""Checks of the keys that train routers, which sections of several training engines have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hpcrl.models.shape import ModelShape
from hpcrl.spec.problems import Problem

ROUTER_KEYS = ("aux_loss", "z_loss", "expert_bias_rate")
BIAS = "e_score_correction_bias"
"""The end of the name of a router's bias per expert."""
MakeProblem = Callable[..., Problem]


def _used(own: Any) -> Iterator[tuple[str, float]]:
    """The keys of a section above 0."""
    yield from ((key, value) for key in ROUTER_KEYS if (value := getattr(own, key, 0.0)))


def frozen_routers(config: Any, own: Any, problem: MakeProblem) -> Iterator[Problem]:
    """Report keys that train routers although these are frozen. `problem` makes a problem of a key of `own`."""
    for key, value in _used(own):
        if "router" in config.trainer.freeze:
            yield problem(key, f"{value:g} trains routers, and trainer.freeze has router; use 0", "freeze")
        elif config.lora is not None:
            yield problem(key, f"{value:g} trains routers, and trainer.lora freezes them; use 0")


def without_routers(own: Any, shape: ModelShape, problem: MakeProblem) -> Iterator[Problem]:
    """Report keys that train what a model's routers do not have."""
    for key, value in _used(own):
        if not shape.num_experts:
            yield problem(key, f"{value:g}, but {shape.family} has no experts; use 0")
        elif key == "expert_bias_rate" and not any(p.name.endswith(BIAS) for p in shape.parameters):
            text = (
                f"{value:g}, but the routers of {shape.family} have no bias, so generators and an exported model would "
                "choose other experts; use 0"
            )
            yield problem(key, text)
