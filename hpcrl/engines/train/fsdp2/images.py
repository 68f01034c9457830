"""The images of a micro-batch: what the tower computes, and which tokens get its features.

Features are placed by the field `images`, never by token id: a model may write the placeholder token itself.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.engines.patches import tower_inputs
from hpcrl.models.mrope import positions
from hpcrl.models.vision import BothWays, Vision
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.batch_images import spans_of
from hpcrl.rollout.device_copies import to_device
from hpcrl.spec.media import placed_span


class ImageInputs(NamedTuple):
    """The tower's input, and the use of its output.

    Args:
        tower: The arguments of the model's get_image_features(), for the micro-batch's different images.
        places: int64 [k], the indices of image tokens among the rank's packed tokens.
        sources: int64 [k], the index of each one's features.
        numbers: int64 [T], of the image of each token, -1 for other tokens; None if all tokens attend to earlier ones
            only.
        both_ways: As in Vision.
    """

    tower: dict[str, Tensor]
    places: Tensor
    sources: Tensor
    numbers: Tensor | None = None
    both_ways: BothWays = "none"

    def to(self, device: torch.device) -> ImageInputs:
        """The same on a device."""
        tower = {name: to_device(tensor, device) for name, tensor in self.tower.items()}
        places, sources = (to_device(tensor, device) for tensor in (self.places, self.sources))
        numbers = None if self.numbers is None else to_device(self.numbers, device)
        return self._replace(tower=tower, places=places, sources=sources, numbers=numbers)


def blocks_of(batch: Batch) -> Tensor:
    """int64 [T]: for each token of an image the image's number, for others -1."""
    numbers = torch.full((max(1, batch.num_tokens),), -1)
    for number, span in enumerate(spans_of(batch)):
        numbers[span.start : span.start + span.length] = number
    return numbers


def visible_keys(numbers: Tensor, window: int | None) -> Tensor:
    """bool [T, T]: the keys that each query of a sequence sees, earlier ones and all of its image, both limited by the
    window. `numbers`, int64 [T], are as in ImageInputs."""
    everything = torch.ones(len(numbers), len(numbers), dtype=torch.bool, device=numbers.device)
    seen = everything.tril() | ((numbers[:, None] == numbers) & (numbers >= 0))
    return seen if window is None else seen & everything.triu(1 - window)


def positions_of(batch: Batch, vision: Vision) -> Tensor:
    """The positions of all tokens, from 0 in each segment: int64 [T, 3] for M-RoPE, else int64 [T]."""
    if not vision.mrope:
        return batch.position_ids
    spans = spans_of(batch)
    parts, following = [], 0
    for start, end in pairwise(batch.cu_segments.tolist()):
        own = []
        while following < len(spans) and spans[following].start < end:
            own.append(placed_span(spans[following], -start))
            following += 1
        parts.append(positions(end - start, own, vision.patch * vision.merge))
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros((0, 3), dtype=torch.int64)


def image_inputs(batch: Batch, vision: Vision, kept: Tensor) -> ImageInputs:
    """The images of a micro-batch, each different one once. Without images it has a black one whose features no token
    gets: a tower that is split over ranks computes on all of them or on none.

    Args:
        kept: int64 [k] on the host, the tokens that this rank has packed.
    """
    sources = np.full(batch.num_tokens, -1, np.int64)
    first: dict[bytes, int] = {}  # digest -> index of the image's first features
    pixels: list[np.ndarray] = []
    count = 0
    for span in spans_of(batch):
        if span.digest not in first:
            first[span.digest] = count
            shape = (span.height, span.width, 3)
            pixels.append(np.frombuffer(batch.pictures[span.digest], np.uint8).reshape(shape))
            count += span.length
        sources[span.start : span.start + span.length] = first[span.digest] + np.arange(span.length)
    if not pixels:
        width, height = vision.least
        pixels.append(np.zeros((height, width, 3), np.uint8))
    of_kept = torch.from_numpy(sources)[kept] if batch.num_tokens else torch.full((1,), -1)
    places = (of_kept >= 0).nonzero()[:, 0]
    inputs = ImageInputs(tower_inputs(pixels, vision), places, of_kept[places])
    if vision.both_ways == "none":
        return inputs
    return inputs._replace(numbers=blocks_of(batch), both_ways=vision.both_ways)
