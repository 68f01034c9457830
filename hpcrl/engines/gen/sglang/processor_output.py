"""Images in SGLang's requests: hpcrl's own patches, places and positions, so SGLang neither expands placeholders nor
resizes images."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hpcrl.engines.patches import make_patches
from hpcrl.models.mrope import positions
from hpcrl.models.vision import Vision
from hpcrl.spec.media import ImageSpan

HASH_BYTES = 8
"""SGLang identifies an image by 64 bits."""


class ProcessorOutputs:
    """The patches of the images in use, in the process that runs SGLang.

    Args:
        vision: The image properties of the model.
        dtype: The model's data type.
    """

    def __init__(self, vision: Vision, dtype: torch.dtype):
        self._vision, self._dtype = vision, dtype
        self._known: dict[bytes, tuple[torch.Tensor, torch.Tensor]] = {}  # patches and grid by digest

    def add(self, contents: Mapping[bytes, bytes], spans: Sequence[ImageSpan]) -> None:
        """Make the patches of new images, and drop images that no span has.

        Args:
            contents: The pixels of new images, by digest.
        """
        used = {span.digest: span for span in spans}
        self._known = {digest: made for digest, made in self._known.items() if digest in used}
        for digest, content in contents.items():
            span = used[digest]
            pixels = np.frombuffer(content, np.uint8).reshape(span.height, span.width, 3)
            patches, grid = make_patches([pixels], self._vision)
            self._known[digest] = patches.to(self._dtype), grid

    def arguments(self, token_ids: Sequence[int], spans: Sequence[ImageSpan], salt: str) -> dict[str, Any]:
        """Arguments of SGLang's GenerateReqInput for a request with images.

        SGLang's caches of prefixes and of tower outputs use `mm_hashes`. The latter cache is never emptied, so hashes
        depend on the salt. SGLang pads input ids with its own hashes before it reads `mm_hashes`, so the ids that it
        would have for these are given as well. Positions are given because SGLang would compute those of Qwen2-VL and
        Qwen2.5-VL from placeholder tokens, which the model can also write itself.
        """
        from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

        made = [self._known[span.digest] for span in spans]
        places = [(span.start, span.start + span.length - 1) for span in spans]
        hashes = [image_hash(span.digest, salt) for span in spans]
        items = [MultimodalDataItem(modality=Modality.IMAGE, offsets=[place]) for place in places]
        for item, number in zip(items, hashes, strict=True):
            item.set_hash(number)
        found = torch.from_numpy(positions(len(token_ids), spans, self._vision.patch * self._vision.merge)).T
        content = {
            "format": "processor_output",
            "pixel_values": torch.cat([patches for patches, _ in made]),
            "image_grid_thw": torch.cat([grid for _, grid in made]),
            "offsets": places,
            "padded_input_ids": MultimodalProcessorOutput.build_padded_input_ids(list(token_ids), items),
            "mrope_positions": found.contiguous(),
            "mrope_position_delta": (found.max() + 1 - len(token_ids)).reshape(1, 1),
        }
        return {"image_data": [content], "mm_hashes": [f"{number:x}" for number in hashes]}


def image_hash(digest: bytes, salt: str) -> int:
    """The number that identifies an image under the weights of a salt."""
    return int.from_bytes(hashlib.sha256(digest + salt.encode()).digest()[:HASH_BYTES], "big")


def file_name(name: str) -> str:
    """A weight's name in files, which SGLang's loaders expect. transformers' modules of these families have others."""
    for module, file in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        if name.startswith(module):
            return file + name.removeprefix(module)
    return name
