"""Images in the native generator: the vision tower, and its features for the tokens of a prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcrl.engines.gen.generation_engine import Request
from hpcrl.engines.gen.native.spec import KEPT_IMAGE_TOKENS
from hpcrl.engines.gen.native.transformer import ImageFeatures
from hpcrl.engines.gen.request_images import spans_of
from hpcrl.engines.patches import make_patches
from hpcrl.models.mrope import positions
from hpcrl.models.vision import Vision
from hpcrl.spec.media import Medium


def make_tower(path: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """transformers' vision tower of the model in an HF folder, with uninitialised weights. Draws no random numbers:
    only buffers, such as the frequencies of rotary embeddings, get values."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        whole: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    tower: Any = whole.model.visual.to_empty(device=device)
    for module in tower.modules():
        if next(module.buffers(recurse=False), None) is not None:
            assert next(module.parameters(recurse=False), None) is None, "its values would be drawn"
            tower._init_weights(module)
    made: nn.Module = tower.eval().requires_grad_(False)
    return made


class Images:
    """The tower's features of the images in use, by digest."""

    def __init__(self, vision: Vision, tower: nn.Module, device: torch.device):
        self._vision, self._tower, self._device = vision, tower, device
        self._unit = vision.patch * vision.merge
        self._known: dict[bytes, Tensor] = {}  # the last used last

    def forget(self) -> None:
        """Drop all features, since the weights have changed."""
        self._known.clear()

    def shift(self, request: Request, num_tokens: int) -> int:
        """The position of the token after the request's first num_tokens tokens, minus its index."""
        return int(positions(num_tokens, spans_of(request), self._unit)[-1].max()) + 1 - num_tokens

    def positions(self, request: Request, start: int, end: int) -> np.ndarray:
        """int64 [end - start, 3]: the positions of some tokens of a request."""
        spans = [span for span in spans_of(request) if span.start < end]
        return positions(max(end, *(span.start + span.length for span in spans), 0), spans, self._unit)[start:end]

    def features(self, parts: Sequence[tuple[Request, int, int]]) -> ImageFeatures | None:
        """The features of the image tokens among the tokens [start, end) of some requests, one after the other; None if
        there are none."""
        wanted: dict[bytes, Medium] = {}
        pieces: list[tuple[bytes, slice]] = []
        places: list[np.ndarray] = []
        offset = 0
        for request, start, end in parts:
            for medium, span in zip(request.media, spans_of(request), strict=True):
                first, last = max(start, span.start), min(end, span.start + span.length)
                if first < last:
                    wanted[span.digest] = medium
                    pieces.append((span.digest, slice(first - span.start, last - span.start)))
                    places.append(np.arange(first, last) - start + offset)
            offset += end - start
        if not pieces:
            return None
        self._compute({digest: medium for digest, medium in wanted.items() if digest not in self._known})
        for digest in wanted:
            self._known[digest] = self._known.pop(digest)
        features = torch.cat([self._known[digest][piece] for digest, piece in pieces])
        self._shrink(keep=len(wanted))
        return ImageFeatures(torch.from_numpy(np.concatenate(places)).to(self._device), features)

    def _compute(self, media: Mapping[bytes, Medium]) -> None:
        if not media:
            return
        patches, grids = make_patches([medium.pixels for medium in media.values()], self._vision)
        dtype = next(self._tower.parameters()).dtype
        output = self._tower(patches.to(self._device, dtype), grid_thw=grids.to(self._device))
        sizes = [medium.length for medium in media.values()]
        self._known |= dict(zip(media, output.pooler_output.split(sizes), strict=True))

    def _shrink(self, keep: int) -> None:
        total = sum(len(features) for features in self._known.values())
        while total > KEPT_IMAGE_TOKENS and len(self._known) > keep:
            oldest = next(iter(self._known))
            total -= len(self._known.pop(oldest))
