"""The operator of SGLang's kernels for CPUs that sampling by seed calls, in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


def murmur_hash32_cpu(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """uint32 [R, C]: MurmurHash3 of the two halves of a row's seed (uint64 [R]), its position ([R]) and a column ([C]),
    as sglang.kernels.ops.sampling.murmur_hash has it for CUDA."""
    halves = seed.view(torch.int64)[:, None]
    position, column = positions.to(torch.int64)[:, None], col_indices.to(torch.int64)
    state = torch.zeros((), dtype=torch.int64)
    for word in (halves & LOW, (halves >> 32) & LOW, position & LOW, column):
        state = state ^ _times(_rotated(_times(word, 0xCC9E2D51), 15), 0x1B873593)
        state = (_rotated(state, 13) * 5 + 0xE6546B64) & LOW
    state = state ^ 16  # bytes
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


def _times(x: Tensor, factor: int) -> Tensor:
    """The low 32 bits of a product, which are right also where it passes 64 bits."""
    return (x * factor) & LOW


def _rotated(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & LOW


LIBRARY = torch.library.Library("sgl_kernel", "DEF")
LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
LIBRARY.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    LIBRARY.define(f"{_name}(Tensor x) -> Tensor")  # qwen3_5, which the processor of Qwen-VL imports, names it


def __getattr__(name: str) -> Callable[..., Any]:
    """SGLang imports more operators, which it calls for other models and for speculative decoding."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return missing
