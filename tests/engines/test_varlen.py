"""Attention over sequences of different lengths: which kernel is chosen, how it is called, and that its results are the
same."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torchs

from hpcrl.engines import varlen
from hpcrl.engines.train.fsdp2.packed_attention import PackedLayout, packed_attention
from hpcrl.engines.train.fsdp2.prefix_tree import share_prefixes
from hpcrl.engines.varlen import Setting, find, flash_attn, sequence_by_sequence, starts_of, torch_varlen

pytestmark = pytest.mark.numerics

SIZES = Setting(torch.device("cpu"), torch.float32, 4, 2, 8, None, None)
LENGTHS = [7, 3, 9, 1]


@pytest.fixture(autouse=True)
def nothing_found() -> Iterator[None]:
    find.cache_clear()
    yield
    find.cache_clear()


def by_formula(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float, left: int, softcap: float) -> Tensor:
    """With all scores; the meaning of `left` and `softcap` as flash-attn and torch document it: a token attends to
    `left` tokens before its own (-1: all)."""
    out = []
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    for first, end in pairwise(bounds):
        scores = torch.einsum("qhd,khd->hqk", q[first:end], k[first:end]) * scale
        scores = scores if not softcap else softcap * torch.tanh(scores / softcap)
        back = torch.arange(end - first)[:, None] - torch.arange(end - first)
        hidden = (back < 0) | ((back > left) if left >= 0 else False)
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[first:end]))
    return torch.cat(out)


def flash_stand_in() -> ModuleType:
    """flash_attn's function with the parameters of version 2.8; the formula replaces the kernel."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert causal and dropout_p == 0 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max()) and softmax_scale is not None
        return by_formula(q, k, v, cu_seqlens_q.tolist(), softmax_scale, window_size[0], softcap)

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


def torch_stand_in(*arguments: Any, **named: Any) -> Tensor:
    """torch's function with its own parameters; the formula replaces the kernel."""
    given = inspect.signature(TORCHS).bind(*arguments, **named).arguments
    heads = [given[name].shape[1] for name in ("query", "key")]
    assert heads[0] == heads[1] or given["enable_gqa"]
    assert given["window_size"][1] == 0, "causal"
    bounds = given["cu_seq_q"].tolist()
    return by_formula(
        given["query"], given["key"], given["value"], bounds, given["scale"], given["window_size"][0], 0.0
    )


TORCHS = torchs.varlen_attn
torch_stand_in.__signature__ = inspect.signature(TORCHS)  # type: ignore[attr-defined]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries' functions, on any device."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_stand_in())
    monkeypatch.setattr(torchs, "varlen_attn", torch_stand_in)
    monkeypatch.setattr(varlen, "_suits", lambda sizes: True)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("make", "softcap"), [(flash_attn, None), (flash_attn, 2.0), (torch_varlen, None)])
def test_every_library_computes_the_same_attention(
    make: Any, window: int | None, softcap: float | None, stand_ins: None
) -> None:
    assert varlen.deviation(make(), replace(SIZES, window=window, softcap=softcap)) < 1e-5


def test_the_first_kernel_that_agrees_is_chosen(monkeypatch: pytest.MonkeyPatch, stand_ins: None) -> None:
    def wrong() -> varlen.Attend:
        return lambda q, k, v, spans: sequence_by_sequence(q, k, v, spans._replace(scale=2 * spans.scale))

    def broken() -> varlen.Attend:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(varlen, "KERNELS", {"wrong": wrong, "broken": broken, "good": lambda: sequence_by_sequence})
    assert find("flash", SIZES) is sequence_by_sequence
    assert find("sdpa", SIZES) is None
    monkeypatch.setattr(varlen, "KERNELS", {"wrong": wrong, "broken": broken})
    find.cache_clear()
    assert find("auto", SIZES) is None
    with pytest.raises(ValueError, match=r"attention=flash: .*wrong: it differs .*; broken: no kernel image is avail"):
        find("flash", SIZES)


def test_torchs_kernel_is_not_used_for_soft_caps(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    capped = replace(SIZES, softcap=2.0)
    assert find("auto", capped) is not None
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # not installed
    find.cache_clear()
    assert find("auto", SIZES) is not None
    assert find("auto", capped) is None


def test_no_kernel_is_found_on_a_cpu() -> None:
    assert find("auto", SIZES) is None
    with pytest.raises(ValueError, match=r"torch: it needs a GPU and 16 bits, not torch.float32 on cpu; set it to aut"):
        find("flash", SIZES)


@pytest.mark.parametrize("shares", [False, True], ids=["apart", "prefixes"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (4, 2.0)])
def test_packed_rows_match_blockwise_attention(
    shares: bool, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "KERNELS", {"reference": lambda: sequence_by_sequence})
    monkeypatch.setattr(varlen, "_suits", lambda sizes: True)
    tokens = torch.tensor([1, 2, 3, 9, 9, 4, 5, 1, 2, 3, 1, 2, 3, 7, 7, 7, 1, 2, 4, 8])
    shared = share_prefixes(tokens, LENGTHS) if shares else None
    kept = 20 if shared is None else len(shared.kept)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, kept, 8) for heads in (4, 2, 2)]
    qkv = [torch.randn(shape, generator=generator) for shape in shapes]
    results = []
    for attention in ("flash", "sdpa"):
        layout = PackedLayout(LENGTHS, torch.device("cpu"), shared, attention)  # type: ignore[arg-type]
        inputs = [x.clone().requires_grad_() for x in qkv]
        out, _ = packed_attention(
            torch.nn.Identity(), *inputs, None, softcap=softcap, sliding_window=window, packed_layout=layout
        )
        assert bool(layout._spans) == (attention == "flash") != ("own_queries" in vars(layout))
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", list(varlen.KERNELS))
def test_installed_kernels_agree_on_a_gpu(name: str, head_dim: int, window: int | None) -> None:
    sizes = Setting(torch.device("cuda"), torch.bfloat16, 28, 4, head_dim, window, None)
    try:
        attend = varlen.KERNELS[name]()
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")
    assert varlen.deviation(attend, sizes) < varlen.TOLERANCE
    assert find("flash", sizes) is not None


def test_offsets_mark_the_start_of_each_sequence() -> None:
    assert starts_of([3, 1, 2], torch.device("cpu")).tolist() == [0, 3, 4, 6]
