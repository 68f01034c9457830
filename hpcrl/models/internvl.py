"""InternVL 3 and 3.5 (arXiv 2504.10479, 2508.18265) in transformers' format, model names with -HF.

A picture becomes up to max_patches square parts in the grid whose ratio of sides is nearest to the picture's, and all
of it as one more square, as by transformers' InternVLProcessor. With max_patches=1 in preprocessor_config.json it
becomes one square.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcrl.models.family import Family
from hpcrl.models.squares import Squares, one_side, read_square
from hpcrl.models.vision import BICUBIC, CLIP_MEAN, CLIP_STD, Tile, Vision, number, sides_of
from hpcrl.spec.media import Medium

START, TOKEN, END = "<img>", "<IMG_CONTEXT>", "</img>"


@dataclass(frozen=True)
class InternVision(Squares):
    """Squares in a grid.

    Args:
        min_tiles: Of the grid.
        max_tiles: Of the grid; with 1, there are no parts.
    """

    min_tiles: int = 1
    max_tiles: int = 12

    placeholder: ClassVar[str] = TOKEN

    def tiles(self, width: int, height: int) -> tuple[Tile, ...]:
        """The parts, row by row, and all of the picture; only the latter in a grid of one."""
        whole = Tile((self.fit(width, height),))
        columns, rows = self._grid(width, height)
        if columns * rows == 1:
            return (whole,)
        side, size = self.side, (columns * self.side, rows * self.side)
        return (
            *(
                Tile((size,), (x * side, y * side, (x + 1) * side, (y + 1) * side), y + 1, x + 1)
                for y in range(rows)
                for x in range(columns)
            ),
            whole,
        )

    def written(self, tiles: Sequence[Medium]) -> str:
        """All tiles' tokens between two marks."""
        return f"{START}{TOKEN * len(tiles)}{END}"

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows, equal to `get_optimal_tiled_canvas` of GOT-OCR2's processor in transformers."""
        if self.max_tiles == 1:
            return 1, 1
        most = range(1, self.max_tiles + 1)
        grids = [(x, y) for x in most for y in most if self.min_tiles <= x * y <= self.max_tiles]
        best, least = (1, 1), math.inf
        for columns, rows in sorted(grids, key=math.prod):
            off = abs(width / height - columns / rows)
            if off < least:
                best, least = (columns, rows), off
            elif off == least and width * height > 0.5 * self.max_pixels * columns * rows:
                best = (columns, rows)
        return best


def read_intern(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Image properties of an InternVL model. ValueError names a key without a usable value."""
    tower, size = config.get("vision_config") or {}, sides_of(processor)
    ratio = config.get("downsample_ratio", 0.5)
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ValueError(f"downsample_ratio is {ratio!r}, not a share")
    side = number(size, {"height": one_side(tower, "image_size", 448)}, "height", default=448)
    found = read_square(config, processor, side, round(1 / ratio), 151667, (CLIP_MEAN, CLIP_STD), BICUBIC)
    least, most = (number(processor, {}, key, default) for key, default in (("min_patches", 1), ("max_patches", 12)))
    return InternVision(**found, min_tiles=least, max_tiles=most)


FAMILY = Family(model_types=("internvl",), vision=read_intern, vllm_images=("internvl",))
