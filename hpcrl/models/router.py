"""How the router of a mixture of experts chooses a token's experts and weights them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExpertRouter:
    """Properties of a model's routers. Each token gets the experts with the highest scores."""

    sigmoid: bool = False
    """Scores are sigmoids of the logits (arXiv 2412.19437), instead of a softmax over all experts."""
    float32: bool = False
    """The logits are computed in float32."""
    normalised: bool = True
    """The weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights."""
    corrected: bool = False
    """There is a bias per expert that only affects the choice (arXiv 2408.15664)."""
    groups: int = 1
    """Number of groups of experts. All of a token's experts are in `chosen_groups` of them (arXiv 2405.04434)."""
    chosen_groups: int = 1
    best: int = 1
    """A group's score is the sum of its best `best` experts' scores."""


def normalised_router(config: Mapping[str, Any]) -> ExpertRouter:
    """A softmax over the chosen experts, whatever config.json says."""
    return ExpertRouter()


def softmax_router(config: Mapping[str, Any]) -> ExpertRouter:
    """Softmax scores, with normalised weights if norm_topk_prob is true."""
    return ExpertRouter(normalised=bool(config.get("norm_topk_prob", False)))


def sigmoid_router(
    config: Mapping[str, Any], *, scale: float = 1.0, groups: int = 1, chosen_groups: int = 1
) -> ExpertRouter:
    """Sigmoid scores as in DeepSeek-V3; the parameters are defaults for keys of config.json."""
    return ExpertRouter(
        sigmoid=True,
        float32=True,
        normalised=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", scale)),
        corrected=True,
        groups=_count(config, "n_group", groups),
        chosen_groups=_count(config, "topk_group", chosen_groups),
        best=2,
    )


def _count(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    return 1 if value is None else int(value)


def unsupported_choices(router: ExpertRouter, num_experts: int, chosen: int) -> Iterator[str]:
    """Why Megatron-Core's routers would choose or weight experts differently."""
    if router.sigmoid and not router.normalised:
        yield "has no norm_topk_prob=false with sigmoid scores"
    if router.normalised and chosen == 1:
        yield "has no normalised weights of a single expert per token"
    if not 1 <= router.chosen_groups <= router.groups:
        yield f"has no topk_group={router.chosen_groups} of n_group={router.groups}"
    elif router.groups > 1 and chosen > (most := router.chosen_groups * (num_experts // router.groups)):
        yield f"chooses {chosen} experts per token, and topk_group={router.chosen_groups} groups have only {most}"
