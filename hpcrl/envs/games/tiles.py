"""Grids as images: flat tiles of plain shapes and colours, without fonts and files. Equal grids give equal pixels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Colour = tuple[int, int, int]
LINE: Colour = (160, 160, 160)
"""Colour of a tile's upper and left edge, one pixel wide."""


@dataclass(frozen=True)
class Figure:
    """A shape in the middle of a tile.

    Args:
        reach: Distance from the middle to the border: of a disc its radius, of a diamond to a corner, of a square to a
            side; in sides of the tile.
    """

    form: Literal["square", "disc", "diamond"]
    colour: Colour
    reach: float


@dataclass(frozen=True)
class DrawnTile:
    """A tile: shapes on a ground, the last one on top. `look` describes it for the model."""

    look: str
    ground: Colour
    shapes: tuple[Figure, ...] = ()


def draw(grid: Sequence[Sequence[DrawnTile]], pixels: int) -> np.ndarray:
    """uint8 [rows * pixels, columns * pixels, 3]: the tiles of a grid."""
    return np.concatenate([np.concatenate([_drawn(tile, pixels) for tile in row], axis=1) for row in grid])


@functools.cache
def _drawn(tile: DrawnTile, pixels: int) -> np.ndarray:
    """uint8 [pixels, pixels, 3]."""
    drawn = np.full((pixels, pixels, 3), tile.ground, np.uint8)
    places = np.abs((np.arange(pixels) + 0.5) / pixels - 0.5)  # distance of each pixel's middle from the tile's middle
    down, right = places[:, None], places[None, :]
    for shape in tile.shapes:
        distances = {
            "square": np.maximum(down, right),
            "disc": np.sqrt(down**2 + right**2),
            "diamond": down + right,
        }
        drawn[distances[shape.form] <= shape.reach] = shape.colour
    drawn[0], drawn[:, 0] = LINE, LINE
    return drawn
