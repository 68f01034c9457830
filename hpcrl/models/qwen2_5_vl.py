"""Qwen2.5-VL (arXiv 2502.13923): the decoder of Qwen2.5 behind a vision tower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpcrl.models.family import Family
from hpcrl.models.grouped import grouped_shape
from hpcrl.models.shape import Decoder, ModelShape, Parameter, section, size
from hpcrl.models.tower import CHANNELS, PREFIX, Tower
from hpcrl.models.vision import read_vision

VISION_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
}


def read_shape(family: str, decoder: Decoder, config: Mapping[str, Any]) -> ModelShape:
    """The vision tower's parameters come first, as in transformers. The decoder's keys are in text_config or at the top
    level of config.json."""
    tower = read_tower(section(config, "vision_config"), VISION_DEFAULTS, gated=True)
    shape = decoder_shape(family, decoder, config)
    return replace(shape, parameters=(*_vision(tower), *shape.parameters), tower=tower)


def decoder_shape(family: str, decoder: Decoder, config: Mapping[str, Any]) -> ModelShape:
    """The decoder behind a tower."""
    text = {**config, **section(config, "text_config")}
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    return grouped_shape(family, decoder, text, prefix="model.language_model.")


def read_tower(config: Mapping[str, Any], defaults: Mapping[str, int], gated: bool) -> Tower:
    """The tower of a vision_config."""
    sizes = {key: size(config, key, default) for key, default in defaults.items()}
    return Tower(
        depth=sizes["depth"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_heads=sizes["num_heads"],
        patch_size=sizes["patch_size"],
        merge=sizes["spatial_merge_size"],
        frames=sizes["temporal_patch_size"],
        out_size=sizes["out_hidden_size"],
        gated=gated,
    )


def of_patches(tower: Tower) -> Parameter:
    """The matrix that reads patches."""
    sizes = (tower.hidden_size, CHANNELS, tower.frames, tower.patch_size, tower.patch_size)
    return Parameter(f"{PREFIX}patch_embed.proj.weight", sizes, "whole")


def linear(name: str, rows: int, columns: int, block: int | None = None) -> Iterator[Parameter]:
    """A matrix and a bias of a tower, which no parallelism splits here."""
    yield Parameter(f"{PREFIX}{name}.weight", (rows, columns), "whole", block=block)
    yield Parameter(f"{PREFIX}{name}.bias", (rows,), "whole", block=block)


def _vision(tower: Tower) -> Iterator[Parameter]:
    hidden, inner = tower.hidden_size, tower.intermediate_size
    merged = hidden * tower.patches
    yield of_patches(tower)
    for block in range(tower.depth):
        for norm in ("norm1", "norm2"):
            yield Parameter(f"{PREFIX}blocks.{block}.{norm}.weight", (hidden,), "whole", block=block)
        yield from linear(f"blocks.{block}.attn.qkv", 3 * hidden, hidden, block)
        yield from linear(f"blocks.{block}.attn.proj", hidden, hidden, block)
        yield from linear(f"blocks.{block}.mlp.gate_proj", inner, hidden, block)
        yield from linear(f"blocks.{block}.mlp.up_proj", inner, hidden, block)
        yield from linear(f"blocks.{block}.mlp.down_proj", hidden, inner, block)
    yield Parameter(f"{PREFIX}merger.ln_q.weight", (hidden,), "whole")
    yield from linear("merger.mlp.0", merged, merged)
    yield from linear("merger.mlp.2", tower.out_size, merged)


FAMILY = Family(
    model_types=("qwen2_5_vl",),
    decoder=Decoder(qkv_bias=True),
    read=read_shape,
    native=True,
    renamed_in_files=True,
    vision=read_vision,
    vllm_images=("qwen2_5_vl",),
    sglang_images=("qwen2_5_vl",),
)
