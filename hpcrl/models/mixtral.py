"""Mixtral (arXiv 2401.04088)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.grouped import Mixture, all_layers, grouped_shape
from hpcrl.models.router import normalised_router
from hpcrl.models.shape import Decoder, ExpertFiles

MIXTURE = Mixture(
    count=("num_experts", 8),
    chosen=("num_experts_per_tok", 2),
    width=("intermediate_size", None),
    layers=all_layers,
)


def _lacks(model: Mapping[str, Any]) -> Iterator[str]:
    if noise := model.get("router_jitter_noise"):
        yield f"adds no noise to router inputs (router_jitter_noise={noise})"


FAMILY = Family(
    model_types=("mixtral",),
    measured_layers=True,
    decoder=Decoder(experts=True, files=ExpertFiles("block_sparse_moe.", "w1", "w3", "w2"), windows="all"),
    read=functools.partial(grouped_shape, mixture=MIXTURE),
    router=normalised_router,
    native=True,
    megatron=MegatronModel(lacks=_lacks),
    renamed_in_files=True,
    peft_experts=frozenset({"gate", "w1", "w2", "w3"}),
)
