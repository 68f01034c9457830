"""Routers in Megatron-Core's configuration, and the choice of groups of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcrl.engines.train.megatron.replay import routers_of
from hpcrl.models.router import ExpertRouter


def router_options(router: ExpertRouter) -> dict[str, Any]:
    """Keys of TransformerConfig."""
    options: dict[str, Any] = {
        "moe_router_score_function": "sigmoid" if router.sigmoid else "softmax",
        "moe_router_pre_softmax": not router.sigmoid and not router.normalised,
        "moe_router_topk_scaling_factor": None if router.scale == 1.0 else router.scale,
        "moe_router_enable_expert_bias": router.corrected,
        "moe_router_bias_update_rate": 0.0,  # RouterBias updates the bias, after the weights
    }
    if router.groups > 1:
        options |= {"moe_router_num_groups": router.groups, "moe_router_group_topk": router.chosen_groups}
    return options


class GroupedChoice:
    """Chooses groups by the sum of their best `best` scores. Megatron-Core would add as many scores as a chosen group
    has chosen experts on average."""

    def __init__(self, best: int):
        self._best = best

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Called by the router like the same method of megatron.core's RouterReplay."""
        assert num_groups is not None and group_topk is not None
        groups = scores.unflatten(1, (num_groups, -1))
        chosen = groups.topk(self._best, -1).values.sum(-1).topk(group_topk, -1).indices
        hidden = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, chosen, False)
        visible = groups.masked_fill(hidden[..., None], -torch.inf).flatten(1)
        values, indices = visible.topk(topk, -1)
        return values, indices


def choose_groups(chunks: Sequence[Any], router: ExpertRouter) -> None:
    """Replace the choice of groups in all routers of a rank, if the model has groups."""
    if router.groups > 1:
        for _, module in routers_of(chunks):
            module.router_replay = GroupedChoice(router.best)
