"""Gemma 3 with images (arXiv 2503.19786): a picture is one square, as by its processor without pan and scan.

An image's tokens attend to each other in both directions. Text alone: hpcrl.models.gemma.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcrl.models.family import Family
from hpcrl.models.squares import Squares, one_side, read_square
from hpcrl.models.vision import BILINEAR, HALF, Vision, number, sides_of
from hpcrl.spec.media import Medium

START, TOKEN, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


@dataclass(frozen=True)
class GemmaVision(Squares):
    """One square per picture."""

    placeholder: ClassVar[str] = START

    def written(self, tiles: Sequence[Medium]) -> str:
        """The picture's tokens between two marks and two empty lines."""
        return f"\n\n{START}{TOKEN * len(tiles)}{END}\n\n"


def read_gemma(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision | None:
    """Image properties of a Gemma 3 model; None if its tower has fewer patches than an image has tokens. ValueError
    names a key without a usable value."""
    tower, size = config.get("vision_config") or {}, sides_of(processor)
    if processor.get("do_pan_and_scan"):
        raise ValueError("do_pan_and_scan=true in preprocessor_config.json is not supported; set it to false")
    side = number(size, {"height": one_side(tower, "image_size", 896)}, "height", default=896)
    tokens = number(config, {}, "mm_tokens_per_image", default=256)
    patches = side // one_side(tower, "patch_size", 14)
    merge = patches // math.isqrt(tokens)
    if not merge:
        return None
    return GemmaVision(**read_square(config, processor, side, merge, 262144, (HALF, HALF), BILINEAR), both_ways="all")


FAMILY = Family(model_types=("gemma3",), scorers=("gemma3",), vision=read_gemma)
