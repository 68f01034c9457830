"""From images' pixels to what a vision tower reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hpcrl.models.vision import Form, Vision


def tower_inputs(images: Sequence[np.ndarray], vision: Vision) -> dict[str, Tensor]:
    """The arguments of get_image_features() of the family's model in transformers, for all images together.

    Args:
        images: uint8 [height, width, 3] each, of a size from vision.tiles().
    """
    return FORMS[vision.form](images, vision)


def _patches(images: Sequence[np.ndarray], vision: Vision) -> dict[str, Tensor]:
    patches, grids = make_patches(images, vision)
    return {"pixel_values": patches, "image_grid_thw": grids}


def make_patches(images: Sequence[np.ndarray], vision: Vision) -> tuple[Tensor, Tensor]:
    """(float32 [P, 3 x frames x patch x patch], int64 [n, 3]): the patches of all images, and per image its numbers of
    frames, rows and columns of patches. The patches of a token are neighbours, as in Qwen2-VL's processor.

    Args:
        images: uint8 [height, width, 3] each, of a size from vision.fit().
    """
    patches, grids = [], []
    for image in images:
        rows, columns = image.shape[0] // vision.patch, image.shape[1] // vision.patch
        blocks = (
            _normalised(image, vision)
            .view(
                rows // vision.merge,
                vision.merge,
                vision.patch,
                columns // vision.merge,
                vision.merge,
                vision.patch,
                3,
            )
            .permute(0, 3, 1, 4, 6, 2, 5)
        )
        still = blocks.reshape(rows * columns, 3, 1, vision.patch, vision.patch)
        patches.append(still.expand(-1, -1, vision.frames, -1, -1).flatten(1))
        grids.append((1, rows, columns))
    return torch.cat(patches), torch.tensor(grids)


def _squares(images: Sequence[np.ndarray], vision: Vision) -> dict[str, Tensor]:
    """float32 [n, 3, side, side]."""
    return {"pixel_values": torch.stack([_normalised(image, vision).permute(2, 0, 1) for image in images])}


def _listed_squares(images: Sequence[np.ndarray], vision: Vision) -> dict[str, Tensor]:
    """float32 [1, n, 3, side, side]: the images of one row, none of which is padding."""
    return {"pixel_values": _squares(images, vision)["pixel_values"][None]}


def _tiles(images: Sequence[np.ndarray], vision: Any) -> dict[str, Tensor]:
    """float32 [squares, 3, side, side], per image all of it, then its parts; and int64 [n, 2], heights and widths."""
    side = vision.side
    squares, sizes = [], []
    for image in images:
        height, width = image.shape[:2]
        whole = Image.fromarray(image).resize((side, side), Image.Resampling(vision.resample))
        across, down = vision.frame(width, height)
        left, upper = (across - width) // 2, (down - height) // 2
        framed = np.zeros((down, across, 3), np.uint8)
        framed[upper : upper + height, left : left + width] = image
        parts = framed.reshape(down // side, side, across // side, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        squares += [np.asarray(whole), *parts]
        sizes.append((height, width))
    return {**_squares(squares, vision), "image_sizes": torch.tensor(sizes)}


def _padded_patches(images: Sequence[np.ndarray], vision: Vision) -> dict[str, Tensor]:
    """float32 [n, P, patch x patch x 3], row by row, and int64 [n, P, 2], their columns and rows, -1 for padding."""
    most = max(vision.num_patches(image.shape[1], image.shape[0]) for image in images)
    patches = torch.zeros(len(images), most, 3 * vision.patch**2)
    places = torch.full((len(images), most, 2), -1)
    for number, image in enumerate(images):
        rows, columns = (size // vision.patch for size in image.shape[:2])
        blocks = _normalised(image, vision).view(rows, vision.patch, columns, vision.patch, 3).transpose(1, 2)
        patches[number, : rows * columns] = blocks.flatten(0, 1).flatten(1)
        grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        places[number, : rows * columns] = grid.view(-1, 2).flip(1)
    return {"pixel_values": patches, "image_position_ids": places}


def _normalised(image: np.ndarray, vision: Vision) -> Tensor:
    """float32 [height, width, 3]."""
    mean, std = torch.tensor(vision.mean), torch.tensor(vision.std)
    return (torch.from_numpy(image.astype(np.float32)) / 255 - mean) / std


FORMS: Mapping[Form, Callable[[Sequence[np.ndarray], Any], dict[str, Tensor]]] = {
    "patches": _patches,
    "squares": _squares,
    "listed squares": _listed_squares,
    "tiles": _tiles,
    "padded patches": _padded_patches,
}
