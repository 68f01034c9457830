"""Images of families whose vision tower reads squares of one size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcrl.models.vision import Form, Vision, colours, filter_of, number


@dataclass(frozen=True)
class Squares(Vision):
    """Images that are resized to a square, whatever their ratio of sides. max_pixels are the square's pixels."""

    form: ClassVar[Form] = "squares"
    mrope: ClassVar[bool] = False
    towers: ClassVar[tuple[str, ...]] = ("model.vision_tower.", "model.multi_modal_projector.")

    @property
    def side(self) -> int:
        """The square's side, pixels."""
        return math.isqrt(self.max_pixels)

    @property
    def least(self) -> tuple[int, int]:
        """The square's size, the only one."""
        return self.side, self.side

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """The square's size. ValueError for a ratio of sides above MAX_RATIO."""
        super().fit(width, height)
        return self.least


def read_square(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    side: int,
    merge: int,
    image_token_id: int,
    colour: tuple[tuple[float, ...], tuple[float, ...]],
    resample: int,
) -> dict[str, Any]:
    """The arguments of Squares from a config.json and an image processor's values. ValueError names a key without a
    usable value.

    Args:
        side: Of the square that the processor makes.
        merge: Side of the square of patches that become one token.
        image_token_id: For a config.json without it.
        colour: Mean and standard deviation for a processor without them.
        resample: Likewise.
    """
    tower = config.get("vision_config") or {}
    patch = one_side(tower, "patch_size", 14)
    if side < patch or side // patch % merge:  # the tower drops pixels beyond the last whole patch
        raise ValueError(f"{side // patch} patches of {patch} pixels, the side of an image, are not divided by {merge}")
    other = {"image_token_id": config.get("image_token_index")}
    return {
        "patch": patch,
        "merge": merge,
        "min_pixels": side * side,
        "max_pixels": side * side,
        "image_token_id": number(config, other, "image_token_id", image_token_id, least=0),
        "frames": 1,
        "mean": colours(processor, "image_mean", colour[0]),
        "std": colours(processor, "image_std", colour[1]),
        "resample": filter_of(processor, resample),
    }


def one_side(section: Mapping[str, Any], key: str, default: int) -> int:
    """A square's side, which some config.json files have twice. ValueError if it is not above 0."""
    value = section.get(key)
    return number({key: value[0] if isinstance(value, list) and value else value}, {}, key, default)
