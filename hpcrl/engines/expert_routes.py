"""The field `routes`: the experts that the generator chose, which the trainer replays (R3, arXiv 2510.11370).

A token's routes, like its log-prob, come from the forward pass that produced its logits. The input of this pass was the
previous token, so the routes are the previous token's experts. Tokens of prompts and observations have no routes,
because they are not decoded; the trainer's own routers choose for them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hpcrl.config import Config
from hpcrl.models.families import read_shape
from hpcrl.models.shape import ModelShape
from hpcrl.rollout.batch import Batch
from hpcrl.spec.trajectory import FIELDS, Field, Level, Origin, declare


@dataclass(frozen=True)
class RouteShape:
    """A model's number of layers with experts, of experts per token, and of experts per layer."""

    num_layers: int
    experts_per_token: int
    num_experts: int

    @classmethod
    def of(cls, shape: ModelShape) -> RouteShape:
        return cls(len(shape.expert_layers), shape.experts_per_token, shape.num_experts)

    @property
    def field(self) -> Field:
        """The field `routes`: one number per layer and chosen expert, in the smallest dtype that can also represent
        `none`."""
        dtype, none = ("uint8", 255) if self.num_experts <= 255 else ("int16", -1)
        meaning = "experts chosen for the token before, by layer, when this one was drawn; 255 or -1: unknown"
        width = self.num_layers * self.experts_per_token
        return Field("routes", dtype, Level.TOKEN, Origin.GENERATOR, meaning, fill=none, width=width)


def routes_of(config: Config, model_path: Path) -> RouteShape | None:
    """The shape of the routes if the trainer replays them, else None; declares the field. Called by the controller and
    by every rank that handles routes. ValueError if the model has no experts."""
    if not (config.trainer.router_replay and config.learns_from_rewards and config.learns) or config.debug == "fake":
        return None
    shape = RouteShape.of(read_shape(json.loads((model_path / "config.json").read_text())))
    if not shape.num_layers:
        raise ValueError(f"trainer.router_replay: the model in {model_path} has no experts; set it to false")
    declare(shape.field)
    return shape


def choices_of(batch: Batch, num_layers: int) -> Tensor:
    """int64 [T, num_layers, experts per token]: the experts that the trainer uses for each token; -1 means the router's
    own choice. ValueError if the rollouts have no routes."""
    if batch.routes is None:
        raise ValueError(
            "trainer.router_replay: these rollouts have no routes, since the run that generated them did not record "
            "any; set it to false"
        )
    none = FIELDS["routes"].fill
    # A token's routes are the choices for the token before it; a row's first token has no routes.
    routes = torch.cat([batch.routes[1:], torch.full_like(batch.routes[:1], none)]).long()
    return routes.masked_fill_(routes == none, -1).view(len(routes), num_layers, -1)
