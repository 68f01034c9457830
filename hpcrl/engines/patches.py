"""From an image's pixels to the patches that a vision tower reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpcrl.models.vision import Vision


def make_patches(images: Sequence[np.ndarray], vision: Vision) -> tuple[Tensor, Tensor]:
    """(float32 [P, 3 x frames x patch x patch], int64 [n, 3]): the patches of all images, and per image its numbers of
    frames, rows and columns of patches. The patches of a token are neighbours, as in Qwen2-VL's processor.

    Args:
        images: uint8 [height, width, 3] each, of a size from vision.fit().
    """
    mean, std = torch.tensor(vision.mean), torch.tensor(vision.std)
    patches, grids = [], []
    for image in images:
        rows, columns = image.shape[0] // vision.patch, image.shape[1] // vision.patch
        pixels = (torch.from_numpy(image.astype(np.float32)) / 255 - mean) / std
        blocks = pixels.view(
            rows // vision.merge,
            vision.merge,
            vision.patch,
            columns // vision.merge,
            vision.merge,
            vision.patch,
            3,
        ).permute(0, 3, 1, 4, 6, 2, 5)
        still = blocks.reshape(rows * columns, 3, 1, vision.patch, vision.patch)
        patches.append(still.expand(-1, -1, vision.frames, -1, -1).flatten(1))
        grids.append((1, rows, columns))
    return torch.cat(patches), torch.tensor(grids)
