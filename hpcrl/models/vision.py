"""What hpcrl knows of a model's images: their sizes, their numbers of tokens, and their tokens' positions."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.spec.media import IMAGES, ImageSpan
from hpcrl.spec.trajectory import declare

MAX_RATIO = 200
"""Limit of an image's longer side divided by its shorter one, as in the processors of Qwen-VL models."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of a model folder that hold the image processor's values; the second in its key image_processor."""


@dataclass(frozen=True)
class Vision:
    """The image sizes of a model, from its config.json and preprocessor_config.json.

    Args:
        patch: Side of a square patch, pixels.
        merge: Side of the square of patches that become one token.
        min_pixels: Smaller images are enlarged.
        max_pixels: Larger images are shrunk.
        image_token_id: The placeholder token, of which an image gets one per token.
        frames: Number of equal frames that represent a still image.
        mean: Subtracted from the channels of pixels between 0 and 1.
        std: Divisors of the channels after that.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    image_token_id: int = 151655
    frames: int = 2
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """The size to which the image is resized: multiples of patch x merge, with about the image's ratio of sides.
        ValueError for a ratio above MAX_RATIO. Equal to `smart_resize` of Qwen2-VL's processor in transformers."""
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ValueError(f"{width} x {height} pixels; the longer side may be {MAX_RATIO} times the shorter one")
        unit = self.patch * self.merge
        sides = [round(side / unit) * unit for side in (width, height)]
        if math.prod(sides) > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            sides = [max(unit, math.floor(side / scale / unit) * unit) for side in (width, height)]
        elif math.prod(sides) < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            sides = [math.ceil(side * scale / unit) * unit for side in (width, height)]
        return sides[0], sides[1]

    def limited(self, max_pixels: int) -> Vision:
        """The same with a lower maximum of pixels. ValueError if the minimum is higher."""
        least = max(self.min_pixels, (self.patch * self.merge) ** 2)
        if max_pixels < least:
            raise ValueError(f"data.max_pixels: {max_pixels}, but the model's smallest image has {least} pixels")
        return replace(self, max_pixels=min(self.max_pixels, max_pixels))

    def num_patches(self, width: int, height: int) -> int:
        """Patches of an image of a size from fit()."""
        return (width // self.patch) * (height // self.patch)

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens of an image of a size from fit()."""
        return self.num_patches(width, height) // self.merge**2


TINY = Vision(patch=14, merge=2, min_pixels=28 * 28, max_pixels=28 * 28 * 64)
"""Image sizes of a model from hpcrl.engines.tiny."""


def positions(num_tokens: int, images: Iterable[ImageSpan], unit: int) -> np.ndarray:
    """int64 [num_tokens, 3]: time, row and column of each token of a sequence, in M-RoPE (arXiv 2409.12191). An image's
    tokens have the time of its first token; the text after it continues after its longer side.

    Args:
        images: In the order of their tokens.
        unit: Pixels of a token's side.
    """
    found = np.empty((num_tokens, 3), np.int64)
    end, following = 0, 0  # of the tokens that have positions; the next position
    for image in images:
        text = image.start - end
        found[end : image.start] = np.arange(following, following + text)[:, None]
        following, end = following + text, image.start + image.length
        rows, columns = image.height // unit, image.width // unit
        grid = np.stack(np.meshgrid([0], np.arange(rows), np.arange(columns), indexing="ij"), -1).reshape(-1, 3)
        found[image.start : end] = following + grid
        following += max(rows, columns)
    found[end:] = np.arange(following, following + num_tokens - end)[:, None]
    return found


def axes_of_pairs(sections: Sequence[int], interleaved: bool) -> tuple[int, ...]:
    """The axis (time, row, column) whose position rotates each pair of a head's dimensions.

    Args:
        sections: The numbers of pairs by axis, mrope_section in config.json.
        interleaved: Whether pairs take the axes in turn, as in Qwen3-VL, until an axis has its number; the other pairs
            take time.
    """
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return tuple(axis if (axis := pair % 3) and pair < 3 * sections[axis] else 0 for pair in range(sum(sections)))


def vision_of(model_path: Path, max_pixels: int | None = None) -> Vision | None:
    """The image properties of a model folder, and declares the field `images`; None for a model without images. Called
    by the controller and by every rank that handles rollouts or prompts. ValueError for an unusable processor, or if
    max_pixels (data.max_pixels), a lower limit than the processor's, allows no image."""
    try:
        config = json.loads((model_path / "config.json").read_text())
    except OSError:
        return None
    if config.get("model_type") not in MODEL_TYPES:
        return None
    vision = read_vision(config, read_processor(model_path))
    declare(IMAGES)
    return vision if max_pixels is None else vision.limited(max_pixels)


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
    """The image processor's values in a model folder; empty if it has none."""
    for name in PROCESSORS:
        try:
            found = json.loads((model_path / name).read_text())
        except OSError:
            continue
        except ValueError as error:
            raise ValueError(f"model.path {model_path}: {name} is not JSON: {error}") from error
        found = found.get("image_processor", found if name == PROCESSORS[0] else None)
        if isinstance(found, dict):
            return found
    return {}


def read_vision(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Image properties of a Qwen-VL model. `processor` is the content of preprocessor_config.json. ValueError names a
    key without a usable value."""
    tower = config.get("vision_config") or {}
    patch = _number(processor, tower, "patch_size", default=14)
    merge = _number(processor, {"merge_size": tower.get("spatial_merge_size")}, "merge_size", default=2)
    frames = _number(tower, processor, "temporal_patch_size", default=2)
    limits = processor.get("size") or {}
    least = _number(processor, {"min_pixels": limits.get("shortest_edge")}, "min_pixels", default=56 * 56)
    most = _number(processor, {"max_pixels": limits.get("longest_edge")}, "max_pixels", default=28 * 28 * 1280)
    token = _number(config, {}, "image_token_id", default=Vision.image_token_id)
    if not (patch * merge) ** 2 <= most or least > most:
        raise ValueError(f"preprocessor_config.json: min_pixels={least} and max_pixels={most} allow no image")
    mean, std = (
        tuple(float(value) for value in processor.get(key) or default)
        for key, default in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD))
    )
    return Vision(patch, merge, least, most, token, frames, mean, std)


def _number(first: Mapping[str, Any], second: Mapping[str, Any], key: str, default: int) -> int:
    value = next((found for found in (first.get(key), second.get(key)) if found is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}, not a positive number")
    return value
