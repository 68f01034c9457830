"""Images in vLLM's engine: hpcrl's own patches and places, so vLLM neither expands placeholders nor resizes images."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch

from hpcrl.engines.gen.generation_engine import Request
from hpcrl.engines.patches import tower_inputs
from hpcrl.models.vision import Form, Vision
from hpcrl.spec.media import Medium

TEXT_ONLY: dict[str, Any] = {"language_model_only": True, "skip_tokenizer_init": False}
"""Arguments of EngineArgs for a model whose images vLLM does not get: without its tower. vLLM makes its processor
nevertheless, which needs a tokenizer."""


def arguments(vision: Vision, max_tokens: int) -> dict[str, Any]:
    """Arguments of EngineArgs for a model with a vision tower, whose images have at most max_tokens tokens. vLLM
    reserves memory for an image of this size."""
    limit = max(vision.min_pixels, min(vision.max_pixels, max_tokens * (vision.patch * vision.merge) ** 2))
    return {
        "mm_processor_kwargs": {"images_kwargs": {"max_pixels": limit}} if vision.form == "patches" else {},
        "skip_tokenizer_init": False,  # vLLM's processor, which it makes for its plan of memory, needs a tokenizer
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,  # make_patches() normalises
        "mm_encoder_tp_mode": "weights",  # "data" needs patches in GPU memory
        "language_model_only": False,
        "limit_mm_per_prompt": {"video": 0},
        "skip_mm_profiling": not torch.cuda.is_available(),
    }


@contextlib.contextmanager
def own_image_sizes(model_config: Any, max_tokens: int | None) -> Iterator[None]:
    """Context in which vLLM's engine is made, for images of at most max_tokens tokens; None: there are none. vLLM would
    make an image of maximum size with its own processor, only to count the image's tokens; it would also count all
    parts of a picture, which are images of their own here."""
    if max_tokens is None:
        yield
        return
    from vllm.multimodal import MULTIMODAL_REGISTRY

    info = MULTIMODAL_REGISTRY._get_model_cls(model_config)._processor_factory.info
    with mock.patch.object(info, "get_mm_max_tokens_per_item", lambda *_, **__: {"image": max_tokens}):
        yield


def keep_pixels() -> None:
    """Let vLLM's workers get the pixels of all requests. vLLM leaves pixels out if an image's prefix is cached, and
    fails if it must compute the prefix again, after a preemption or new weights."""
    from vllm.v1.core.sched import output

    output.strip_covered_mm_data = lambda features, *_, **__: features


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
            inputs = tower_inputs([medium.pixels], self._vision)
            inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
            item = self._items[digest] = _item_of(*ITEMS[self._vision.form](inputs, self._vision))
        return item


TowerInputs = Mapping[str, torch.Tensor]
"""Arguments of a model's embed_multimodal() in vLLM."""


def _item_of(flat: TowerInputs, batched: TowerInputs) -> Any:
    """One image, as vLLM's processors return it.

    Args:
        flat: Tensors that vLLM concatenates to the tensors of other images.
        batched: Tensors [1, ...] that vLLM stacks, or puts into a list if shapes differ.
    """
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    config = {name: MultiModalFieldConfig.batched("image", keep_on_cpu=name != "pixel_values") for name in batched}
    for name, tensor in flat.items():
        config[name] = MultiModalFieldConfig.flat_from_sizes("image", torch.tensor([len(tensor)]))
    return MultiModalKwargsItems.from_hf_inputs({**flat, **batched}, config)["image"][0]


ONE = torch.tensor([1])


def _patches(inputs: TowerInputs, vision: Vision) -> tuple[TowerInputs, TowerInputs]:
    return {"pixel_values": inputs["pixel_values"]}, {"image_grid_thw": inputs["image_grid_thw"]}


def _squares(inputs: TowerInputs, vision: Vision) -> tuple[TowerInputs, TowerInputs]:
    counts = dict.fromkeys(("num_patches", "image_num_patches"), ONE)
    return {"pixel_values": inputs["pixel_values"]}, {**counts, "image_token_id": vision.image_token_id * ONE}


def _listed_squares(inputs: TowerInputs, vision: Vision) -> tuple[TowerInputs, TowerInputs]:
    (pixels,) = inputs["pixel_values"]
    mask = torch.ones(len(pixels), *pixels.shape[2:], dtype=torch.bool)
    return {"pixel_values": pixels, "pixel_attention_mask": mask}, {"num_patches": ONE}


def _tiles(inputs: TowerInputs, vision: Vision) -> tuple[TowerInputs, TowerInputs]:
    return {}, {"pixel_values": inputs["pixel_values"][None], "image_sizes": inputs["image_sizes"]}


ITEMS: Mapping[Form, Callable[[TowerInputs, Vision], tuple[TowerInputs, TowerInputs]]] = {
    "patches": _patches,
    "squares": _squares,
    "listed squares": _listed_squares,
    "tiles": _tiles,
}
"""The two arguments of _item_of() for what hpcrl.engines.patches.tower_inputs() returns for one image."""
