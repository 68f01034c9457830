"""Qwen3-VL (arXiv 2511.21631): the decoder of Qwen3, dense or with experts, behind a vision tower whose inner features
some of the decoder's layers also get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpcrl.models.family import Family
from hpcrl.models.qwen2_5_vl import decoder_shape, linear, of_patches, read_tower
from hpcrl.models.shape import CannotPlanError, Decoder, ModelShape, Parameter, section, size
from hpcrl.models.tower import PREFIX, Tower
from hpcrl.models.vision import read_vision

VISION_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
}
DEEPSTACK = (8, 16, 24)
NUM_POSITIONS = 2304


def read_shape(family: str, decoder: Decoder, config: Mapping[str, Any]) -> ModelShape:
    """The vision tower's parameters come first, as in transformers."""
    vision = section(config, "vision_config")
    deep = vision.get("deepstack_visual_indexes", DEEPSTACK)
    if not isinstance(deep, list | tuple):
        raise CannotPlanError(f"deepstack_visual_indexes in config.json is {deep!r}, a list of blocks is needed")
    tower = replace(
        read_tower(vision, VISION_DEFAULTS, gated=False),
        num_mergers=1 + len(deep),
        num_positions=size(vision, "num_position_embeddings", NUM_POSITIONS),
    )
    shape = decoder_shape(family, decoder, config)
    return replace(shape, parameters=(*_vision(tower), *shape.parameters), tower=tower)


def _vision(tower: Tower) -> Iterator[Parameter]:
    hidden, inner = tower.hidden_size, tower.intermediate_size
    yield of_patches(tower)
    yield Parameter(f"{PREFIX}patch_embed.proj.bias", (hidden,), "whole")
    yield Parameter(f"{PREFIX}pos_embed.weight", (tower.num_positions, hidden), "whole")
    for block in range(tower.depth):
        for norm in ("norm1", "norm2"):
            yield from _norm(f"blocks.{block}.{norm}", hidden, block)
        yield from linear(f"blocks.{block}.attn.qkv", 3 * hidden, hidden, block)
        yield from linear(f"blocks.{block}.attn.proj", hidden, hidden, block)
        yield from linear(f"blocks.{block}.mlp.linear_fc1", inner, hidden, block)
        yield from linear(f"blocks.{block}.mlp.linear_fc2", hidden, inner, block)
    merged = hidden * tower.patches
    mergers = ["merger", *(f"deepstack_merger_list.{number}" for number in range(tower.num_mergers - 1))]
    for merger in mergers:
        yield from _norm(f"{merger}.norm", hidden if merger == "merger" else merged)
        yield from linear(f"{merger}.linear_fc1", merged, merged)
        yield from linear(f"{merger}.linear_fc2", tower.out_size, merged)


def _norm(name: str, size: int, block: int | None = None) -> Iterator[Parameter]:
    yield Parameter(f"{PREFIX}{name}.weight", (size,), "whole", block=block)
    yield Parameter(f"{PREFIX}{name}.bias", (size,), "whole", block=block)


FAMILY = Family(
    model_types=("qwen3_vl",),
    decoder=Decoder(reads_bias=True, qk_norm=True, head_dim=128),
    read=read_shape,
    vision=read_vision,
    vllm_images=("qwen3_vl",),
    sglang_images=("qwen3_vl",),
)
MOE = Family(
    model_types=("qwen3_vl_moe",),
    decoder=Decoder(reads_bias=True, qk_norm=True, experts=True),
    read=read_shape,
    vision=read_vision,
    vllm_images=("qwen3_vl_moe",),
    sglang_images=("qwen3_vl_moe",),
    renamed_in_files=True,
    transposes_experts=True,
)
