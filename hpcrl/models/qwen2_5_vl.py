"""Qwen2.5-VL (arXiv 2502.13923): the decoder of Qwen2.5 behind a vision tower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpcrl.models.family import Family
from hpcrl.models.grouped import grouped_shape
from hpcrl.models.shape import Decoder, ModelShape, Parameter, section, size
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
IN_CHANNELS = 3


def read_shape(family: str, decoder: Decoder, config: Mapping[str, Any]) -> ModelShape:
    """The vision tower's parameters come first, as in transformers. The decoder's keys are in text_config or at the top
    level of config.json."""
    text = {**config, **section(config, "text_config")}
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    shape = grouped_shape(family, decoder, text, prefix="model.language_model.")
    return replace(shape, parameters=(*_vision(section(config, "vision_config")), *shape.parameters))


def _vision(config: Mapping[str, Any]) -> Iterator[Parameter]:
    """The vision tower's parameters, which no parallelism splits here."""
    sizes = {key: size(config, key, default) for key, default in VISION_DEFAULTS.items()}
    hidden, inner, patch = sizes["hidden_size"], sizes["intermediate_size"], sizes["patch_size"]
    merged = hidden * sizes["spatial_merge_size"] ** 2

    def linear(name: str, rows: int, columns: int) -> Iterator[Parameter]:
        yield Parameter(f"model.visual.{name}.weight", (rows, columns), "whole")
        yield Parameter(f"model.visual.{name}.bias", (rows,), "whole")

    patches = (hidden, IN_CHANNELS, sizes["temporal_patch_size"], patch, patch)
    yield Parameter("model.visual.patch_embed.proj.weight", patches, "whole")
    for block in range(sizes["depth"]):
        for norm in ("norm1", "norm2"):
            yield Parameter(f"model.visual.blocks.{block}.{norm}.weight", (hidden,), "whole")
        yield from linear(f"blocks.{block}.attn.qkv", 3 * hidden, hidden)
        yield from linear(f"blocks.{block}.attn.proj", hidden, hidden)
        yield from linear(f"blocks.{block}.mlp.gate_proj", inner, hidden)
        yield from linear(f"blocks.{block}.mlp.up_proj", inner, hidden)
        yield from linear(f"blocks.{block}.mlp.down_proj", hidden, inner)
    yield Parameter("model.visual.merger.ln_q.weight", (hidden,), "whole")
    yield from linear("merger.mlp.0", merged, merged)
    yield from linear("merger.mlp.2", sizes["out_hidden_size"], merged)


FAMILY = Family(
    model_types=("qwen2_5_vl",),
    decoder=Decoder(qkv_bias=True),
    read=read_shape,
    native=True,
    renamed_in_files=True,
    vision=read_vision,
)
