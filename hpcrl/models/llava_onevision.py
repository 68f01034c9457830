"""LLaVA-OneVision (arXiv 2408.03326).

A picture is fitted into the best of image_grid_pinpoints, and the tower reads all of it as one square, and its parts.
A learned newline ends each row of the parts' features, without the features of padding; too many features are
interpolated. Each picture is seen as if it were the only one, as by transformers' processor for a list of pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcrl.models.family import Family
from hpcrl.models.squares import Squares, one_side, read_square
from hpcrl.models.vision import BICUBIC, CLIP_MEAN, CLIP_STD, MAX_RATIO, Form, Vision, number, sides_of

SIDES = tuple(range(384, 2304 + 1, 384))
GRID = tuple((height, width) for height in SIDES for width in SIDES)
ASPECT = "anyres_max_"


@dataclass(frozen=True)
class LlavaVision(Squares):
    """A square, and a fitted picture in parts.

    Args:
        grid: Heights and widths of the frames into which pictures are fitted.
        most: Squares of features beyond which features are interpolated.
    """

    grid: tuple[tuple[int, int], ...] = GRID
    most: int = 9

    form: ClassVar[Form] = "tiles"
    towers: ClassVar[tuple[str, ...]] = ("model.vision_tower.", "model.multi_modal_projector.", "model.image_newline")

    @property
    def max_tokens(self) -> int:
        """Of the square, and of parts that are just not interpolated, with a newline per row."""
        area = max(height * width for height, width in self.grid) // self.side**2
        rows = max(height for height, _ in self.grid) // self.side * self._patches
        return int((1 + min(area, 1.1**2 * self.most)) * self._patches**2) + rows

    def frame(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the frame for a picture, equal to `select_best_resolution` in transformers: with the most
        of the picture's pixels, then with the least padding."""

        def rank(frame: tuple[int, int]) -> tuple[int, int]:
            scale = min(frame[1] / width, frame[0] / height)
            used = min(int(width * scale) * int(height * scale), width * height)
            return used, used - frame[0] * frame[1]

        best = max(self.grid, key=rank)
        return best[1], best[0]

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """The size of the picture in its frame. ValueError for a ratio of sides above MAX_RATIO."""
        if max(width, height) > MAX_RATIO * min(width, height):
            return super().fit(width, height)
        frame = self.frame(width, height)
        across, down = frame[0] / width, frame[1] / height
        if across < down:
            return frame[0], min(math.ceil(height * across), frame[1])
        return min(math.ceil(width * down), frame[0]), frame[1]

    def num_patches(self, width: int, height: int) -> int:
        """Patches of the square and of all parts."""
        frame = self.frame(width, height)
        return (1 + frame[0] * frame[1] // self.max_pixels) * self._patches**2

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens of the square, of the parts without padding, and of a newline per row."""
        frame, patches = self.frame(width, height), self._patches
        columns, rows = (size // self.side * patches for size in frame)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        ratio = math.sqrt(rows * columns / (self.most * patches**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return patches**2 + rows * (columns + 1)

    @property
    def _patches(self) -> int:
        return self.side // self.patch


def read_llava(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Image properties of a LLaVA-OneVision model. ValueError names a key without a usable value."""
    size, tower = sides_of(processor), config.get("vision_config") or {}
    side = number(size, {"height": one_side(tower, "image_size", 384)}, "height", default=384)
    aspect = str(config.get("vision_aspect_ratio") or f"{ASPECT}9")
    if not aspect.removeprefix(ASPECT).isdigit():
        raise ValueError(f"vision_aspect_ratio is {aspect!r}; {ASPECT}N is supported")
    if config.get("vision_feature_select_strategy", "full") != "full":
        raise ValueError("vision_feature_select_strategy is not 'full', which towers without a class token need")
    grid = tuple(_frames(processor.get("image_grid_pinpoints") or config.get("image_grid_pinpoints") or GRID, side))
    found = read_square(config, processor, side, 1, 151646, (CLIP_MEAN, CLIP_STD), BICUBIC)
    return LlavaVision(**found, grid=grid, most=int(aspect.removeprefix(ASPECT)))


def _frames(given: Any, side: int) -> Iterator[tuple[int, int]]:
    for height, width in given:
        if height % side or width % side:
            raise ValueError(f"image_grid_pinpoints: {height} x {width} is no multiple of {side} x {side}")
        yield int(height), int(width)


FAMILY = Family(model_types=("llava_onevision",), vision=read_llava, vllm_images=("llava_onevision",))
