"""Idefics3 (arXiv 2408.12637) and SmolVLM (arXiv 2504.05299).

A picture is enlarged or shrunk to a longer side of size.longest_edge pixels, then to whole multiples of a square, whose
parts the model sees one by one, and then all of it as one square. With do_image_splitting=false in
preprocessor_config.json, it sees only the latter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from hpcrl.models.family import Family
from hpcrl.models.squares import Squares, read_square
from hpcrl.models.vision import HALF, LANCZOS, Form, Tile, Vision, number, sides_of
from hpcrl.spec.media import Medium

TOKEN, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
MAX_SIDE = 4096


@dataclass(frozen=True)
class IdeficsVision(Squares):
    """Squares in a grid, each with its row and column written before it.

    Args:
        longest: The longer side of a picture before it is divided.
        splits: Whether pictures are divided.
    """

    longest: int = 4 * 364
    splits: bool = True

    form: ClassVar[Form] = "listed squares"
    placeholder: ClassVar[str] = TOKEN
    towers: ClassVar[tuple[str, ...]] = ("model.vision_model.", "model.connector.")

    def tiles(self, width: int, height: int) -> tuple[Tile, ...]:
        """The parts, row by row, and all of the picture; only the latter if the grid has one part. Sizes equal those in
        Idefics3's processor in transformers."""
        whole, side = self.fit(width, height), self.side
        shrunk = self._shrunk(width, height)
        if not self.splits:
            return (Tile((shrunk, whole)),)
        longer, ratio = math.ceil(max(shrunk) / side) * side, shrunk[0] / shrunk[1]
        other = int(longer / ratio if ratio >= 1 else longer * ratio)
        shorter = math.ceil(other / side) * side
        size = (longer, shorter) if ratio >= 1 else (shorter, longer)
        columns, rows = size[0] // side, size[1] // side
        if columns * rows == 1:
            return (Tile((shrunk, size)),)
        return (
            *(
                Tile((shrunk, size), (x * side, y * side, (x + 1) * side, (y + 1) * side), y + 1, x + 1)
                for y in range(rows)
                for x in range(columns)
            ),
            Tile((shrunk, size, whole)),
        )

    def written(self, tiles: Sequence[Medium]) -> str:
        """Each part after its row and column, a line per row, and all of the picture after an empty line."""
        text = ""
        for part, following in pairwise(tiles):
            text += f"{AROUND}<row_{part.row}_col_{part.column}>{TOKEN}" + "\n" * (following.row != part.row)
        if text:
            text += "\n"
        return f"{text}{AROUND}{WHOLE}{TOKEN}{AROUND}"

    def _shrunk(self, width: int, height: int) -> tuple[int, int]:
        ratio = width / height
        longer = self.longest
        shorter = int(longer / ratio if ratio >= 1 else longer * ratio)
        shorter = max(1, shorter + shorter % 2)
        if longer > MAX_SIDE:
            ratio = longer / shorter if ratio >= 1 else shorter / longer
            longer, shorter = MAX_SIDE, max(1, int(MAX_SIDE / ratio if ratio >= 1 else MAX_SIDE * ratio))
        return (longer, shorter) if ratio >= 1 else (shorter, longer)


def read_idefics(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Image properties of an Idefics3 or SmolVLM model. ValueError names a key without a usable value."""
    side = number(sides_of(processor, "max_image_size"), {}, "longest_edge", default=364)
    longest = number(sides_of(processor), {}, "longest_edge", default=4 * 364)
    merge = number(config, {}, "scale_factor", default=2)
    found = read_square(config, processor, side, merge, 128257, (HALF, HALF), LANCZOS)
    return IdeficsVision(**found, longest=longest, splits=processor.get("do_image_splitting", True) is not False)


FAMILY = Family(model_types=("idefics3", "smolvlm"), vision=read_idefics, vllm_images=("idefics3", "smolvlm"))
