"""Images in vLLM's engine: hpcrl's own patches and places, so vLLM neither expands placeholders nor resizes images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch

from hpcrl.engines.gen.generation_engine import Request
from hpcrl.engines.patches import make_patches
from hpcrl.models.vision import Vision
from hpcrl.spec.media import Medium


def arguments(max_pixels: int | None) -> dict[str, Any]:
    """Arguments of EngineArgs for a model with a vision tower, whose images have at most max_pixels pixels; None: the
    maximum of its folder. vLLM reserves memory for an image of this size."""
    limits = {} if max_pixels is None else {"mm_processor_kwargs": {"images_kwargs": {"max_pixels": max_pixels}}}
    return {
        **limits,
        "skip_tokenizer_init": False,  # vLLM's processor, which it makes for its plan of memory, needs a tokenizer
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,  # make_patches() normalises
        "mm_encoder_tp_mode": "weights",  # "data" needs patches in GPU memory
        "language_model_only": False,
        "limit_mm_per_prompt": {"video": 0},
        "skip_mm_profiling": not torch.cuda.is_available(),
    }


class ImagePrompts:
    """Requests with images in vLLM's form.

    Args:
        vision: The image properties of the model.
        dtype: The model's data type.
    """

    def __init__(self, vision: Vision, dtype: torch.dtype):
        self._vision, self._dtype = vision, dtype
        self._items: WeakValueDictionary[str, Any] = WeakValueDictionary()  # by digest, while a request has the image

    def prompt(self, request: Request, cache_salt: str) -> Any:
        """vLLM's MultiModalInput. Digests identify images in its prefix cache and in its cache of tower outputs."""
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        digests = [medium.digest.hex() for medium in request.media]
        items = [self._item(digest, medium) for digest, medium in zip(digests, request.media, strict=True)]
        places = [PlaceholderRange(offset=medium.start, length=medium.length) for medium in request.media]
        return mm_input(
            list(request.prompt_ids),
            MultiModalKwargsItems({"image": items}),
            {"image": digests},
            {"image": places},
            cache_salt=cache_salt,
        )

    def _item(self, digest: str, medium: Medium) -> Any:
        item = self._items.get(digest)
        if item is None:
            patches, grids = make_patches([medium.pixels], self._vision)
            item = self._items[digest] = _item_of({"pixel_values": patches.to(self._dtype), "image_grid_thw": grids})
        return item


def _item_of(values: Mapping[str, torch.Tensor]) -> Any:
    """One image, as vLLM's processors of Qwen-VL models return it, but with patches that stay in host memory until the
    tower reads them. vLLM drops other patches of a request whose prefix is cached, and fails if it must compute the
    prefix again, after a preemption or new weights."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    sizes = values["image_grid_thw"].prod(-1)
    config = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes, keep_on_cpu=True),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return MultiModalKwargsItems.from_hf_inputs(values, config)["image"][0]
