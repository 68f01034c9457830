"""The model families that have a file, by model_type, and their models' shapes and images."""

from __future__ import annotations

import functools
import json
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcrl.models import (
    alibi,
    bert,
    deepseek_v2,
    deepseek_v3,
    ernie4_5,
    gemma,
    gemma3,
    gemma4,
    glm4_moe,
    glm4v,
    gpt_oss,
    hunyuan,
    hyperclovax,
    idefics3,
    internvl,
    kimi_linear,
    llama,
    llama4,
    llava_onevision,
    mamba2,
    minimax,
    mistral,
    mixtral,
    olmo,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen2_vl,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    row_attention,
    rwkv,
    seed_oss,
    xlstm,
)
from hpcrl.models.family import Family
from hpcrl.models.from_transformers import built_shape, source_of
from hpcrl.models.grouped import grouped_shape
from hpcrl.models.mtp import num_joins, num_trained, untrainable
from hpcrl.models.shape import CannotPlanError, ModelShape
from hpcrl.models.vision import TINY, Vision, read_vision
from hpcrl.spec.media import IMAGES
from hpcrl.spec.trajectory import declare

LISTED = (
    *(qwen2.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY, llama.FAMILY, mistral.FAMILY, mistral.MINISTRAL, phi3.FAMILY),
    *(gemma.GEMMA2, gemma.GEMMA3, qwen2_5_vl.FAMILY, qwen3_vl.FAMILY, qwen3_vl.MOE, deepseek_v3.FAMILY),
    *(deepseek_v3.KIMI, bert.FAMILY, hyperclovax.FAMILY, llama4.FAMILY, mamba2.FAMILY, mamba2.OTHERS),
    *(mixtral.FAMILY, qwen2_moe.FAMILY),
    *(
        qwen2_vl.FAMILY,
        qwen3_5.FAMILY,
        qwen3_5.TEXT,
        qwen3_next.FAMILY,
        glm4v.FAMILY,
        internvl.FAMILY,
        gemma3.FAMILY,
        gemma4.FAMILY,
    ),
    *(idefics3.FAMILY, llava_onevision.FAMILY, deepseek_v2.FAMILY, glm4_moe.FAMILY, gpt_oss.FAMILY),
    *(olmo.OLMO2, olmo.OLMO3, seed_oss.FAMILY, ernie4_5.FAMILY, hunyuan.FAMILY),
    *(glm4_moe.LITE, minimax.M2, ernie4_5.MOE, hunyuan.MOE, minimax.FAMILY, rwkv.FAMILY, xlstm.FAMILY),
    *(kimi_linear.FAMILY, row_attention.FAMILY, alibi.FAMILY, alibi.DOGE, alibi.GPT),
)
FAMILIES: dict[str, Family] = {model_type: family for family in LISTED for model_type in family.model_types}
UNKNOWN = Family(model_types=())
"""The family of a model_type without a file."""
PLANNED = tuple(name for name, family in FAMILIES.items() if family.decoder is not None)
NATIVE = tuple(name for name, family in FAMILIES.items() if family.native)
MEGATRON = tuple(name for name, family in FAMILIES.items() if family.megatron is not None)
VLLM_SEEING = tuple(name for name, family in FAMILIES.items() if name in family.vllm_images)
SGLANG_SEEING = tuple(name for name, family in FAMILIES.items() if name in family.sglang_images)
SEEING = tuple(name for name, family in FAMILIES.items() if family.vision is not None)
SEEING_SCORERS = tuple(name for name, family in FAMILIES.items() if name in family.scorers)
"""Each a tuple of model_type values: parameters are listed here; the native generator runs them; Megatron trains them;
vLLM gets images for them; SGLang does; images are understood; reward models understand images."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of a model folder that hold the image processor's values; the second in its key image_processor."""


def family_of(model_type: Any) -> Family:
    """The family of a model_type; UNKNOWN if it has no file."""
    return FAMILIES.get(str(model_type), UNKNOWN)


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The model described by a config.json, with the defaults of transformers 5 for missing keys.

    Families that are not in PLANNED are built by transformers, whose import takes seconds. CannotPlanError if
    transformers cannot do so, or if a size is missing, too large or not a whole number above 0.
    """
    name = config.get("model_type")
    family = family_of(name)
    if family.decoder is None:
        shape = built_shape(config, sees=family.vision is not None and "vision_config" in config)
    else:
        shape = (family.read or grouped_shape)(str(name), family.decoder, config)
        shape = replace(shape, source=source_of(config)) if family.measured_layers else shape
    if untrainable(config, None):
        return shape
    return replace(shape, mtp_layers=num_trained(config), mtp_joins=num_joins(config))


def with_decoder(shape: ModelShape) -> ModelShape:
    """A shape with its decoder's properties, also if transformers built the model."""
    return replace(shape, decoder=family_of(shape.family).unlisted or shape.decoder)


def shape_of(folder: str | None, key: str) -> ModelShape:
    """Sizes and parameters of the model in a folder; `key` is the configuration key of the folder, for messages.
    CannotPlanError if the folder's config.json cannot be read."""
    path = Path(folder or "") / "config.json"
    try:
        return read_shape(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise CannotPlanError(f"{key}: {path} cannot be read: {error}") from error


def known_shape(folder: Path) -> ModelShape | None:
    """Sizes and parameters of the model in a folder; None for a family that is not in PLANNED, whose generators may use
    other names than transformers, and if they cannot be read."""
    try:
        config = _object(folder / "config.json")
        return read_shape(config) if config.get("model_type") in PLANNED else None
    except (OSError, ValueError):
        return None


def has_experts(model_type: str) -> bool:
    """Whether models with this model_type have routed experts; False if the decoder is not known."""
    decoder = family_of(model_type).decoder
    return decoder is not None and decoder.experts


def vision_of(model_path: Path, max_pixels: int | None = None) -> Vision | None:
    """read_vision_of() the run's model; declares the field `images` if it takes images. Called by the controller and by
    every rank that handles rollouts or prompts. ValueError also if max_pixels (data.max_pixels), a lower limit than the
    processor's, allows no image."""
    vision = read_vision_of(model_path)
    if vision is None:
        return None
    declare(IMAGES)
    return vision if max_pixels is None else vision.limited(max_pixels)


def read_vision_of(model_path: Path) -> Vision | None:
    """The image properties of a model folder; None for a model without images. ValueError for an unusable processor."""
    try:
        config = _object(model_path / "config.json")
    except (OSError, ValueError):  # reported where the model is checked
        return None
    read = family_of(config.get("model_type")).vision
    if read is None:
        return None
    processor = read_processor(model_path)
    try:
        return read(config, processor)
    except ValueError as error:
        raise ValueError(f"model.path: the files of {model_path} are unusable for images: {error}") from None


def unseen_type(families: Container[str] | None, model_path: Path) -> str:
    """`model_type=NAME` of a model folder whose images an engine does not take; empty if it takes them. `families` is
    the engine's media_families (hpcrl.spec.kinds.GenEngineSpec)."""
    model_type = _object(model_path / "config.json").get("model_type")
    return "" if families is None or model_type in families else f"model_type={model_type}"


@functools.lru_cache(maxsize=8)
def largest_image(model_path: Path | None) -> int | None:
    """The maximum of pixels in a model folder, None for the tiny model; None if the folder does not define it."""
    if model_path is None:
        return TINY.max_pixels
    try:
        processor = read_processor(model_path)
        return read_vision({}, processor).max_pixels if processor else None
    except ValueError:  # reported where the model is checked
        return None


def read_processor(model_path: Path) -> Mapping[str, Any]:
    """The image processor's values in a model folder; empty if it has none. ValueError if a file is damaged."""
    for name in PROCESSORS:
        try:
            content = _object(model_path / name)
        except OSError:
            continue
        found = content.get("image_processor", content if name == PROCESSORS[0] else None)
        if found and isinstance(found, dict):
            return found
    return {}


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. OSError if there is no file, ValueError if it contains something else."""
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model.path: {file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"model.path: {file} has no JSON object")
    return content
