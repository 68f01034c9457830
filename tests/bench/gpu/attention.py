"""Attention of the trainer over packed sequences: each kernel at the widths of the model, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from hpcrl.engines import varlen
from hpcrl.engines.train.fsdp2.packed_attention import PackedLayout, by_blocks
from tests.bench.gpu.common import Check, Row, median


def measure(check: Check) -> Iterator[Row]:
    """TFLOP/s of each kernel, and of blocks of rows with padding; the largest deviation from the reference."""
    shape, device = check.model(few_layers=True)[1], torch.device(check.device)
    sizes = varlen.Setting(
        device, torch.bfloat16, shape.num_heads, shape.num_kv_heads, shape.head_dim, window=None, softcap=None
    )
    longest = check.pick(2048, 16)
    lengths = [longest, longest * 3 // 4, longest // 2, longest // 2, longest // 4]
    layout, scale = PackedLayout(lengths, device), shape.head_dim**-0.5
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    qkv = [torch.randn(sum(lengths), n, shape.head_dim, device=device).bfloat16().requires_grad_() for n in heads]
    operations = 6 * shape.query_size * sum(length**2 for length in lengths) / 1e12

    def rate(attend: varlen.Attend | None) -> float:
        return operations / median([check.seconds(partial(_step, qkv, layout, scale, attend)) for _ in range(6)][1:])

    yield Row("attention", "blocks of rows", rate(None), "TFLOP/s", check.facts.get("product"))
    for name, make in varlen.KERNELS.items():
        try:
            attend = make()
        except ImportError:
            yield Row("attention", name, verdict="not installed")
            continue
        if not check.on_gpu:
            yield Row("attention", name, verdict="not run", note="needs a GPU")
            continue
        differs = varlen.deviation(attend, sizes)
        verdict = "ok" if differs < varlen.TOLERANCE else "bad"
        yield Row("attention", f"{name}, deviation", differs, "", varlen.TOLERANCE, verdict)
        yield Row("attention", name, rate(attend), "TFLOP/s", check.facts.get("product"))


def _step(qkv: list[Tensor], layout: PackedLayout, scale: float, attend: varlen.Attend | None) -> None:
    q, k, v = qkv
    if attend is None:
        out = by_blocks((q, k, v), layout, scale, None, None)
    else:
        spans, _, _ = layout.spans(own_queries=False)
        out = attend(q, k, v, spans._replace(scale=scale))
    torch.autograd.grad(out, qkv, torch.ones_like(out))
