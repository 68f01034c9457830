"""Gemma 4 with images: a picture keeps its ratio of sides and gets at most max_soft_tokens tokens.

In large models (use_bidirectional_attention="vision"), tokens of an image attend to each other in both directions in
layers with windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcrl.models.family import Family
from hpcrl.models.vision import BICUBIC, BothWays, Form, Vision, colours, filter_of, number
from hpcrl.spec.media import Medium

START, TOKEN, END = "<|image>", "<|image|>", "<image|>"


@dataclass(frozen=True)
class Gemma4Vision(Vision):
    """Pictures are enlarged or shrunk to max_pixels."""

    form: ClassVar[Form] = "padded patches"
    mrope: ClassVar[bool] = False
    placeholder: ClassVar[str] = TOKEN
    towers: ClassVar[tuple[str, ...]] = ("model.vision_tower.", "model.embed_vision.")

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Equal to `get_aspect_ratio_preserving_size` of Gemma 4's processor in transformers."""
        scale, unit = math.sqrt(self.max_pixels / (width * height)), self.patch * self.merge
        columns, rows = (math.floor(scale * side / unit) for side in (width, height))
        longest = self.max_pixels // unit**2
        if not columns and not rows:
            raise ValueError(f"{width} x {height} pixels in {self.max_pixels} pixels are less than a token")
        if not rows:
            columns, rows = min(width // height, longest), 1
        elif not columns:
            columns, rows = 1, min(height // width, longest)
        return columns * unit, rows * unit

    def written(self, tiles: Sequence[Medium]) -> str:
        """The picture's tokens between two marks."""
        return f"{START}{TOKEN * len(tiles)}{END}"


def read_gemma4(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision | None:
    """Image properties of a Gemma 4 model; None if it has no tower. ValueError names a key without a usable value."""
    tower, text = config.get("vision_config"), config.get("text_config") or {}
    if tower is None:
        return None
    patch = number(processor, tower, "patch_size", default=16)
    merge = number(processor, tower, "pooling_kernel_size", default=3)
    most = number(processor, {}, "max_soft_tokens", default=280) * (patch * merge) ** 2
    token = number(config, {}, "image_token_id", default=258880, least=0)
    normalises = bool(processor.get("do_normalize"))
    mean = colours(processor if normalises else {}, "image_mean", (0.0, 0.0, 0.0))
    std = colours(processor if normalises else {}, "image_std", (1.0, 1.0, 1.0))
    resample = filter_of(processor, BICUBIC)
    both_ways: BothWays = "windows" if text.get("use_bidirectional_attention") == "vision" else "none"
    return Gemma4Vision(patch, merge, (patch * merge) ** 2, most, token, 1, mean, std, resample, both_ways)


FAMILY = Family(model_types=("gemma4",), vision=read_gemma4)
