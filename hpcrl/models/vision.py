"""What a vision-language model needs to know of an image's size: its resized size, and its number of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_RATIO = 200
"""Limit of an image's longer side divided by its shorter one, as in the processors of Qwen-VL models."""


@dataclass(frozen=True)
class Vision:
    """The image sizes of a model, from its config.json and preprocessor_config.json.

    Args:
        patch: Side of a square patch, pixels.
        merge: Side of the square of patches that become one token.
        min_pixels: Smaller images are enlarged.
        max_pixels: Larger images are shrunk.
        image_token: Text of the placeholder, of which an image gets one per token.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    image_token: str = "<|image_pad|>"

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

    def num_patches(self, width: int, height: int) -> int:
        """Patches of an image of a size from fit()."""
        return (width // self.patch) * (height // self.patch)

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens of an image of a size from fit()."""
        return self.num_patches(width, height) // self.merge**2


def read_vision(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Sizes of a Qwen-VL model. `processor` is the content of preprocessor_config.json. ValueError names a key without
    a usable value."""
    tower = config.get("vision_config") or {}
    patch = _number(processor, tower, "patch_size", default=14)
    merge = _number(processor, {"merge_size": tower.get("spatial_merge_size")}, "merge_size", default=2)
    limits = processor.get("size") or {}
    least = _number(processor, {"min_pixels": limits.get("shortest_edge")}, "min_pixels", default=56 * 56)
    most = _number(processor, {"max_pixels": limits.get("longest_edge")}, "max_pixels", default=28 * 28 * 1280)
    if not (patch * merge) ** 2 <= most or least > most:
        raise ValueError(f"preprocessor_config.json: min_pixels={least} and max_pixels={most} allow no image")
    return Vision(patch, merge, least, most)


def _number(first: Mapping[str, Any], second: Mapping[str, Any], key: str, default: int) -> int:
    value = next((found for found in (first.get(key), second.get(key)) if found is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}, not a positive number")
    return value
