"""The weights with which vLLM computes, under their HF names (check_weights=true).

On a CPU, vLLM multiplies with packed copies. A linear layer's matrix is read back as its product with the identity
matrix; experts are unpacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hpcrl.engines.gen.vllm.slices import slices
from hpcrl.models.shape import ModelShape

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
DIGITS = 128
"""Base of the digits in _unpacked(); smaller integers are exact in bfloat16 and in all wider types."""


def shown(
    vllm_model: Any, model: ModelShape, names: Iterable[str], options: Mapping[str, Any], index: int, num_ranks: int
) -> Iterator[tuple[str, Tensor]]:
    """Full-shape tensors with the values that rank `index` of num_ranks has; other values are undefined. Experts on a
    GPU are left out, because its kernels reorder them."""
    modules = dict(vllm_model.named_modules())
    shapes = {parameter.name: parameter.shape for parameter in model.parameters}
    for name in names:
        if (own := _own(modules, model, name)) is None:
            continue
        whole = own.new_empty(shapes[name])
        boxes = slices(options, model, name, shapes[name], index, num_ranks)
        for tensor_slice, piece in zip(boxes, own.chunk(len(boxes), 1) if len(boxes) > 1 else (own,), strict=True):
            whole[tuple(slice(*bounds) for bounds in tensor_slice)] = piece
        yield name, whole


@torch.no_grad()
def _own(modules: Mapping[str, Any], model: ModelShape, name: str) -> Tensor | None:
    """This rank's slices of a weight; None if it cannot be read back."""
    path, _, kind = name.rpartition(".")
    parent, _, last = path.rpartition(".")
    if path.endswith(".experts"):
        return _experts(modules, path, kind)
    if path in (EMBEDDING, HEAD):
        return _words(modules, model, path)
    if last in QKV:
        layer = modules[f"{parent}.qkv_proj"]
        heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        return _values(layer, kind).split([number * layer.head_size for number in heads])[QKV.index(last)]
    if last in GATE_UP:
        return _values(modules[f"{parent}.gate_up_proj"], kind).chunk(2)[GATE_UP.index(last)]
    return _values(modules[path], kind)


def _values(layer: Any, kind: str) -> Tensor:
    """The matrix or the bias of a linear layer, or the scale of a norm."""
    own: Tensor = getattr(layer, kind)
    if kind == "bias" or not hasattr(layer, "quant_method") or own.device.type != "cpu":
        return own
    width = getattr(layer, "input_size_per_partition", layer.input_size)  # routers are not split
    identity = torch.eye(width, dtype=own.dtype)
    product: Tensor = layer.quant_method.apply(layer, identity, None)
    return product.t()


def _words(modules: Mapping[str, Any], model: ModelShape, path: str) -> Tensor | None:
    """The embedding or the head without padding rows; None if all rows are padding. If the model is tied, numbers in
    which embedding and head differ are NaN."""
    layer = modules[path]
    if not (rows := layer.num_org_embeddings_per_partition):
        return None
    own: Tensor = layer.weight if path == EMBEDDING else _values(layer, "weight")
    if path == EMBEDDING and model.tied and modules.get(HEAD, layer) is not layer:
        head = _values(modules[HEAD], "weight").to(own.dtype)
        own = torch.where(own == head, own, torch.nan)
    return own[:rows]


def _experts(modules: Mapping[str, Any], path: str, kind: str) -> Tensor | None:
    """A layer's experts; None if their packing is not known."""
    layer = next(module for name, module in modules.items() if name.startswith(path) and hasattr(module, "w13_weight"))
    packed = layer.w13_weight if kind == "gate_up_proj" else layer.w2_weight
    if packed.device.type != "cpu":
        return None
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernel = layer.quant_method.moe_kernel.fused_experts
    if not isinstance(kernel, CPUUnquantizedExperts) or kernel._use_zentorch:
        return None
    return _unpacked(packed, kernel.isa)


def _unpacked(packed: Tensor, isa: str) -> Tensor:
    """The unpacked experts. Packing only permutes an expert's numbers, so packing the numbers' indices, digit by digit,
    shows the permutation."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    size, places, unit = packed[0].numel(), torch.zeros_like(packed[:1], dtype=torch.int64), 1
    while unit < size:
        digit = (torch.arange(size) // unit % DIGITS).to(packed.dtype).view_as(places)
        places += cpu_prepack_moe_weight(digit, isa).long() * unit
        unit *= DIGITS
    found = torch.empty_like(packed)
    found.view(len(found), -1)[:, places.flatten()] = packed.view(len(packed), -1)
    return found
