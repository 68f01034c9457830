"""Chunked log-probs and entropies against the dense formulas, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpcrl.engines.train.fsdp2 import logits
from hpcrl.engines.train.fsdp2.logits import Head, token_logprobs
from tests.planner.measuring import peak_bytes

pytestmark = pytest.mark.numerics


def dense(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, temperature: float):
    scores = torch.nn.functional.linear(hidden, weight, bias)
    if head.softcap:
        scores = head.softcap * torch.tanh(scores / head.softcap)
    log_p = (scores * head.scale / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(with_bias: bool) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, generator=generator) for s in ((23, 8), (31, 8), (31,)))
    return [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_() if with_bias else None]


@pytest.mark.parametrize("head", [Head(), Head(softcap=2.0), Head(scale=0.25), Head(softcap=3.0, scale=2.0)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 100])
def test_chunked_log_probs_match_the_dense_formula(head: Head, with_bias: bool, chunk_tokens: int) -> None:
    targets = torch.randint(31, (23,), generator=torch.Generator().manual_seed(1))
    weights = torch.linspace(-1, 2, 23)
    gradients = []
    for chunked in (False, True):
        tensors = inputs(with_bias)
        if chunked:
            result = token_logprobs(
                *tensors, targets, head=head, temperature=0.7, chunk_tokens=chunk_tokens, entropy=True
            )
        else:
            expected = result = dense(*tensors, targets, head, 0.7)
        ((result[0] + 0.4 * result[1]) * weights).sum().backward()
        gradients.append([t.grad for t in tensors if t is not None])
    for got, want in zip(result, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for got, want in zip(*gradients, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_without_entropy_only_log_probs_contribute_to_the_gradient() -> None:
    targets = torch.arange(23)
    tensors, others = inputs(True), inputs(True)
    logprobs, entropy = token_logprobs(
        *tensors, targets, head=Head(softcap=2.0), temperature=1.0, chunk_tokens=5, entropy=False
    )
    assert entropy is None
    logprobs.sum().backward()
    dense(*others, targets, Head(softcap=2.0), 1.0)[0].sum().backward()
    for got, want in zip(tensors, others, strict=True):
        assert (got.grad - want.grad).abs().max() <= 1e-5 * want.grad.abs().max()


def work(dtype: torch.dtype, chunk_tokens: int, asked: str, head: Head | None = None) -> Callable[[], object]:
    """Forward and backward of 600 tokens and 3,000 words; asked: no entropy, one to log, or one in the loss."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(3000, 8, generator=generator).to(dtype).requires_grad_()
    targets = torch.arange(600)

    def run() -> None:
        logprobs, entropy = token_logprobs(
            hidden, weight, None, targets, head=head or Head(), temperature=0.7, chunk_tokens=chunk_tokens,
            entropy=asked != "no",
        )  # fmt: skip
        (logprobs.sum() + entropy.sum() if asked == "loss" else logprobs.sum()).backward()

    run()  # gradients are there from now on
    return run


@pytest.mark.parametrize("head", [Head(), Head(softcap=5.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("asked", ["no", "log", "loss"])
@pytest.mark.parametrize(("dtype", "chunks"), [(torch.float32, 1.25), (torch.bfloat16, 1.6)])
def test_peak_memory_is_little_more_than_one_chunk(
    dtype: torch.dtype, chunks: float, asked: str, head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 another half a chunk, for the projection's results and the gradient."""
    monkeypatch.setattr(logits, "BLOCK_NUMBERS", 10 * 3000)
    peak = peak_bytes(work(dtype, 300, asked, head), tmp_path / "trace.json")
    assert peak < chunks * 300 * 3000 * 4


def test_the_memory_measure_detects_a_second_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the softmax of a whole chunk at once."""
    monkeypatch.setattr(logits, "BLOCK_NUMBERS", 300 * 3000)
    assert peak_bytes(work(torch.float32, 300, "no"), tmp_path / "trace.json") > 1.9 * 300 * 3000 * 4


@pytest.mark.parametrize("block_numbers", [1, 7 * 31, 1 << 20])
def test_the_block_size_does_not_change_a_bit(block_numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for numbers in (1 << 30, block_numbers):
        monkeypatch.setattr(logits, "BLOCK_NUMBERS", numbers)
        tensors = inputs(True)
        head = Head(softcap=2.0, scale=0.5)
        logprobs, entropy = token_logprobs(
            *tensors, torch.arange(23), head=head, temperature=0.7, chunk_tokens=10, entropy=True
        )
        (logprobs.sum() + 0.4 * entropy.sum()).backward()
        results.append([logprobs, entropy, *(tensor.grad for tensor in tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_tensor_is_larger_than_one_chunk_of_logits() -> None:
    """Largest float tensor made in either pass; the check sees the dense formula's [N, V]."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.size = max(self.size, result.numel())
            return result

    hidden, weight = torch.randn(200, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    targets = torch.zeros(200, dtype=torch.int64)
    with Largest() as chunked:
        token_logprobs(hidden, weight, None, targets, head=Head(), temperature=1.0, chunk_tokens=20, entropy=True)[
            0
        ].sum().backward()
    with Largest() as whole:
        dense(hidden, weight, None, targets, Head(), 1.0)[0].sum().backward()
    assert chunked.size == 20 * 50
    assert whole.size == 200 * 50


def bfloat16_inputs(with_bias: bool) -> list[Tensor | None]:
    """Logits near 40: where bfloat16 has steps of .25."""
    hidden, weight, bias = (None if t is None else t.detach().clone() for t in inputs(with_bias))
    hidden[:, 0], weight[:, 0] = 6, 6
    return [None if t is None else t.bfloat16().requires_grad_() for t in (hidden, weight, bias)]


@pytest.mark.parametrize("head", [Head(float32=True), Head(softcap=30.0, scale=0.5, float32=True)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_float32_head_matches_autograd_on_converted_numbers(
    head: Head, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values with fp32 precision; gradients, which are bfloat16 like the parameters, with bfloat16 precision."""
    monkeypatch.setattr(logits, "BLOCK_NUMBERS", 50)  # blocks of the matrix, the last one shorter
    targets, weights = torch.arange(23), torch.linspace(-1, 2, 23)
    results, gradients = [], []
    for way in (head, replace(head, float32=False), None):
        tensors = bfloat16_inputs(with_bias)
        if way is None:
            floats = [None if t is None else t.float() for t in tensors]
            result = dense(*floats, targets, head, 0.7)
        else:
            result = token_logprobs(*tensors, targets, head=way, temperature=0.7, chunk_tokens=7, entropy=True)
        ((result[0] + 0.4 * result[1]) * weights).sum().backward()
        results.append(torch.stack(result))
        gradients.append([t.grad for t in tensors if t is not None])
    converted, rounded, exact = results
    assert (converted - exact).abs().max() < 1e-4
    assert (rounded - exact).abs().max() > 1e-2
    for got, want in zip(gradients[0], gradients[2], strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - want).abs().max() <= 0.01 * want.abs().max()


def test_log_probs_of_a_bfloat16_model_stay_in_float32() -> None:
    tensors = inputs(False)
    hidden, weight = (t.detach().bfloat16().requires_grad_() for t in tensors[:2])
    targets = torch.arange(23)
    got = token_logprobs(hidden, weight, None, targets, head=Head(), temperature=1.0, chunk_tokens=6, entropy=False)[0]
    got.sum().backward()
    assert got.dtype == torch.float32 and weight.grad.dtype == torch.bfloat16
    want = dense(hidden.float(), weight.float(), None, targets, Head(), 1.0)[0]
    assert (got - want).abs().max() < 0.05
