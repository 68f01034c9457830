"""Choose a kernel for causal attention over concatenated sequences of different lengths, without padding or mask.

find() uses a kernel only if its outputs and gradients agree with suffix_attention() on random tensors of the model's
sizes on this device, since support differs between library versions and GPUs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from hpcrl.engines.blocked_attention import causal_attention, suffix_attention, suffix_mask
from hpcrl.rollout.device_copies import to_device

Choice = Literal["auto", "flash", "sdpa"]
PROBE_LENGTHS, PROBE_QUERIES = (70, 1, 33), (20, 1, 0)
"""Tokens of sequences, and how many of the last are queries, if these are fewer."""
TOLERANCE = 0.02  # relative to the largest number; rounding to bfloat16 changes numbers by 0.004


class Spans(NamedTuple):
    """N concatenated sequences, whose last tokens have queries; window and softcap are as in causal_attention()."""

    starts: Tensor  # int32 [N + 1]: queries of the sequences begin at starts[:N] and end at starts[1:]
    longest: int  # the largest number of queries
    key_starts: Tensor  # the same for keys and values
    longest_keys: int
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # which no kernel supports


Attend = Callable[[Tensor, Tensor, Tensor, Spans], Tensor]
"""(q [T, heads, D], k and v [keys, kv_heads, D], spans) -> [T, heads, D], differentiable."""


@dataclass(frozen=True)
class Setting:
    """Properties that a kernel may or may not support."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None
    fewer_queries: bool = False
    """Whether sequences may have fewer queries than keys."""


def sequence_by_sequence(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """See Attend. Calls causal_attention() or suffix_attention() for each sequence; the reference for the kernels."""
    parts = []
    starts = spans.starts.tolist()
    key_starts = starts if spans.key_starts is spans.starts else spans.key_starts.tolist()
    for own, keys in zip(pairwise(starts), pairwise(key_starts), strict=True):
        pairs = ((q, own), (k, keys), (v, keys))
        qr, kr, vr = (x[first:end].transpose(0, 1)[None] for x, (first, end) in pairs)
        skipped = kr.shape[2] - qr.shape[2]
        if not skipped:
            out = causal_attention(
                qr, kr, vr, scale=spans.scale, window=spans.window, softcap=spans.softcap, sinks=spans.sinks
            )
        elif qr.shape[2]:
            first = torch.tensor([skipped], device=q.device)
            mask = suffix_mask(first, qr.shape[2], kr.shape[2], spans.window, spans.sinks is not None, q.dtype)
            out = suffix_attention(qr, kr, vr, mask, scale=spans.scale, softcap=spans.softcap, sinks=spans.sinks)
        else:
            continue
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def flash_attn() -> Attend:
    """The kernel of the package flash-attn (arXiv 2307.08691). ImportError without it."""
    from flash_attn import flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q,
            k,
            v,
            spans.starts,
            spans.key_starts,
            spans.longest,
            spans.longest_keys,
            softmax_scale=spans.scale,
            causal=True,
            window_size=(-1, -1) if spans.window is None else (spans.window - 1, 0),
            softcap=spans.softcap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return out

    return attend


def torch_varlen() -> Attend:
    """torch's own kernel. ImportError for a version without it."""
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # other versions do not need the argument
        grouped["enable_gqa"] = True

    def attend(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        if spans.softcap is not None:
            raise NotImplementedError("no soft-capped scores")
        reach = (-1 if spans.window is None else spans.window - 1, 0)
        ends = (spans.starts, spans.key_starts, spans.longest, spans.longest_keys)
        out = varlen_attn(q, k, v, *ends, scale=spans.scale, window_size=reach, **grouped)
        return cast(Tensor, out)

    return attend


KERNELS: dict[str, Callable[[], Attend]] = {"flash-attn": flash_attn, "torch": torch_varlen}
"""The kernels in order of preference. All need a GPU and 16-bit numbers."""


@functools.lru_cache(maxsize=64)
def find(choice: Choice, sizes: Setting) -> Attend | None:
    """The kernel for these sizes; None if attention must use blocks of rows of equal length. ValueError with the
    reasons if choice is "flash" and no kernel is usable."""
    if choice == "sdpa":
        return None
    if choice == "auto" and not _suits(sizes):
        return None
    reasons = []
    for name, make in KERNELS.items():
        try:
            attend = make()
            differs = deviation(attend, sizes) if _suits(sizes) else None
        except (AssertionError, AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
            reasons.append(f"{name}: {' '.join(str(error).split())[:150]}")
            continue
        if differs is None:
            reasons.append(f"{name}: it needs a GPU and 16 bits, not {sizes.dtype} on {sizes.device.type}")
        elif differs > TOLERANCE:
            reasons.append(f"{name}: it differs from the reference by {differs:.2g}")
        else:
            return attend
    if choice == "flash":
        raise ValueError(
            f"trainer.fsdp2.attention=flash: no usable variable-length kernel: {'; '.join(reasons)}; set it to auto"
        )
    return None


def _suits(sizes: Setting) -> bool:
    return sizes.device.type == "cuda" and sizes.dtype.itemsize == 2


def deviation(attend: Attend, sizes: Setting) -> float:
    """The largest difference between the kernel's outputs and gradients and the fp32 reference, relative to the largest
    number."""
    generator = torch.Generator(sizes.device).manual_seed(0)
    lengths = PROBE_QUERIES if sizes.fewer_queries else PROBE_LENGTHS
    queries, keys = (sum(lengths), sizes.heads, sizes.head_dim), (sum(PROBE_LENGTHS), sizes.kv_heads, sizes.head_dim)
    shapes = (queries, keys, keys, queries)
    *qkv, weight = (torch.randn(shape, generator=generator, device=sizes.device).to(sizes.dtype) for shape in shapes)
    window = sizes.window if sizes.window is None else min(sizes.window, 16)
    starts, key_starts = (starts_of(some, sizes.device) for some in (lengths, PROBE_LENGTHS))
    longest = (max(lengths), key_starts, max(PROBE_LENGTHS))
    spans = Spans(starts, *longest, sizes.head_dim**-0.5, window, sizes.softcap)
    found = []
    for way, dtype in ((attend, sizes.dtype), (sequence_by_sequence, torch.float32)):
        with torch.inference_mode(False), torch.enable_grad():
            q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in qkv)
            out = way(q, k, v, spans)
            found.append([out.detach(), *torch.autograd.grad(out, (q, k, v), weight.to(out.dtype))])
    got, want = (torch.cat([x.flatten().float() for x in tensors]) for tensors in found)
    return float(((got - want).abs().max() / want.abs().max()).nan_to_num(nan=torch.inf))


def starts_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32 [N + 1]: the start of each sequence, and the end of the last."""
    return to_device(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
