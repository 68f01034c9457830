"""The slices of each weight that a tensor-parallel rank of vLLM 0.32 reads (weight loaders in linear.py,
vocab_parallel_embedding.py and fused_moe/routed_experts.py of vllm/model_executor/layers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.models.families import family_of
from hpcrl.models.shape import ModelShape
from hpcrl.spec.weight_layout import TensorSlice, full_slice

RESHAPING = {
    *("enable_elastic_ep", "enable_eplb", "eplb_config", "expert_placement_strategy", "hf_config_path"),
    *("model_class_overrides", "model_impl", "prefill_context_parallel_size", "quantization", "quantization_config"),
}
"""Arguments of vLLM's EngineArgs that may change which slices a rank reads."""
VOCABULARY_BLOCK = 64
"""vLLM pads the vocabulary to a multiple of this."""


def are_known(options: Mapping[str, Any], model: ModelShape) -> bool:
    """Whether vLLM's split of this model's weights is tested."""
    return family_of(model.family).vllm_slices and not RESHAPING & options.keys()


def slices(
    options: Mapping[str, Any], model: ModelShape | None, name: str, shape: tuple[int, ...], index: int, num_ranks: int
) -> tuple[TensorSlice, ...]:
    """The disjoint slices, at least one, that rank `index` of num_ranks reads of a weight with this name and shape.
    `options` are generator.vllm.options; `model` is None if its parameters are not known."""
    split = model.splits.get(name, "whole") if model is not None and are_known(options, model) else "whole"
    if num_ranks == 1 or split == "whole" or model is None:
        return (full_slice(shape),)
    if split == "vocabulary":
        return (_along(shape, 0, *_words(shape[0], index, num_ranks)),)
    axis, number, blocks = 0, 1, num_ranks  # the number of matrices stacked along an axis, and of blocks per matrix
    if split == "key":
        blocks = min(model.num_kv_heads, num_ranks)  # with more ranks than heads, consecutive ranks have one head
    elif split == "row":
        axis = 1
    elif split == "expert" and not options.get("enable_expert_parallel"):
        axis, number = (1, 2) if name.endswith("gate_up_proj") else (2, 1)
    size, place = shape[axis] // number, index * blocks // num_ranks
    return tuple(_along(shape, axis, *_block(start, size, place, blocks)) for start in range(0, shape[axis], size))


def _block(start: int, size: int, index: int, blocks: int) -> tuple[int, int]:
    """Bounds of block `index` of `blocks`; if the size is not divisible, the first blocks are larger by one."""
    each, more = divmod(size, blocks)
    first = start + index * each + min(index, more)
    return first, first + each + (index < more)


def _words(rows: int, index: int, num_ranks: int) -> tuple[int, int]:
    """A rank's rows of the vocabulary. If they are all padding, it gets the last row, since vLLM needs every tensor."""
    padded = -(-rows // VOCABULARY_BLOCK) * VOCABULARY_BLOCK
    first = min(padded * index // num_ranks, rows - 1)
    return first, max(first + 1, min(padded * (index + 1) // num_ranks, rows))


def _along(shape: tuple[int, ...], axis: int, first: int, end: int) -> TensorSlice:
    """The slice of a tensor between two bounds along an axis."""
    return (*full_slice(shape[:axis]), (first, end), *full_slice(shape[axis + 1 :]))
