"""MiniMax-01: lightning attention (arXiv 2501.08313). MiniMax-M2: grouped-query attention, and routed experts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from hpcrl.models.family import Family
from hpcrl.models.grouped import Mixture, all_layers, corrected_experts, grouped_shape
from hpcrl.models.router import ExpertRouter
from hpcrl.models.shape import Decoder, ExpertFiles

MIXTURE = Mixture(
    count=("num_experts", 256),
    chosen=("num_experts_per_tok", 8),
    width=("intermediate_size", 1536),
    layers=all_layers,
    parameters=corrected_experts,
)


def _router(config: Mapping[str, Any]) -> ExpertRouter:
    return ExpertRouter(sigmoid=True, corrected=True)


FAMILY = Family(model_types=("minimax",), mixers=("MiniMaxLightningAttention",))
M2 = Family(
    model_types=("minimax_m2",),
    measured_layers=True,
    decoder=Decoder(
        qk_norm=True,
        qk_norm_joint=True,
        experts=True,
        correction_name="e_score_correction_bias",
        files=ExpertFiles("block_sparse_moe.", "w1", "w3", "w2", correction="e_score_correction_bias"),
        partly_rotated=True,
        head_dim=128,
    ),
    read=functools.partial(grouped_shape, mixture=MIXTURE),
    router=_router,
    native=True,
    renamed_in_files=True,
    peft_experts=frozenset({"gate", "w1", "w2", "w3"}),
)
