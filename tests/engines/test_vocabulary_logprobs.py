"""Log-probs and entropies of a divided vocabulary: the dense formulas, and the memory of one chunk. Those of several
ranks are in the contracts of the splits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.engines.train.fsdp2 import logits
from hpcrl.engines.train.fsdp2.logits import Head
from hpcrl.engines.train.megatron.logprobs import vocabulary_logprobs
from tests.engines.test_logits import dense
from tests.planner.measuring import peak_bytes

pytestmark = [pytest.mark.numerics, pytest.mark.usefixtures("world_of_one")]

WORDS, PADDED = 31, 40


def inputs() -> list[Tensor]:
    """States, and a matrix with rows of padding."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in ((23, 8), (PADDED, 8))]


def divided(hidden: Tensor, weight: Tensor, chunk_tokens: int, entropy: bool) -> tuple[Tensor, Tensor | None]:
    options: dict[str, Any] = {"vocab_size": WORDS, "temperature": 0.7, "group": dist.group.WORLD}
    return vocabulary_logprobs(hidden, weight, torch.arange(23), chunk_tokens=chunk_tokens, entropy=entropy, **options)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 100])
def test_chunked_log_probs_match_the_dense_formula(chunk_tokens: int, entropy: bool) -> None:
    weights, gradients = torch.linspace(-1, 2, 23), []
    results: list[tuple[Tensor, Tensor | None]] = []
    for way in ("divided", "dense"):
        hidden, weight = inputs()
        if way == "divided":
            results.append(divided(hidden, weight, chunk_tokens, entropy))
        else:
            logprobs, entropies = dense(hidden, weight[:WORDS], None, torch.arange(23), Head(), 0.7)
            results.append((logprobs, entropies if entropy else None))
        loss = sum(part * factor for part, factor in zip(results[-1], (1.0, 0.4), strict=True) if part is not None)
        (loss * weights).sum().backward()
        gradients.append((hidden.grad, weight.grad))
    for got, want in zip(*results, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for got, want in zip(*gradients, strict=True):
        assert got is not None and want is not None and (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("block_numbers", [1, 7 * WORDS])
def test_the_block_size_does_not_change_a_bit(block_numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for numbers in (1 << 30, block_numbers):
        monkeypatch.setattr(logits, "BLOCK_NUMBERS", numbers)
        hidden, weight = inputs()
        logprobs, entropies = divided(hidden, weight, 10, entropy=True)
        assert entropies is not None
        (logprobs.sum() + 0.4 * entropies.sum()).backward()
        results.append([logprobs, entropies, hidden.grad, weight.grad])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))  # type: ignore[arg-type]


def work(dtype: torch.dtype, asked: str) -> Callable[[], object]:
    """Forward and backward of 600 tokens and 3,000 words by chunks of 300; asked: no entropy, one to log, or one in
    the loss."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 8, generator=generator).to(dtype).requires_grad_() for size in (600, 3000))
    options: dict[str, Any] = {"vocab_size": 3000, "temperature": 0.7, "chunk_tokens": 300, "group": dist.group.WORLD}

    def run() -> None:
        logprobs, entropies = vocabulary_logprobs(hidden, weight, torch.arange(600), entropy=asked != "no", **options)
        loss = logprobs.sum()
        if asked == "loss":
            assert entropies is not None
            loss = loss + entropies.sum()
        loss.backward()

    run()  # gradients are there from now on
    return run


@pytest.mark.parametrize("asked", ["no", "log", "loss"])
@pytest.mark.parametrize(("dtype", "chunks"), [(torch.float32, 1.25), (torch.bfloat16, 1.6)])
def test_peak_memory_is_little_more_than_one_chunk(
    dtype: torch.dtype, chunks: float, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 another half a chunk, for the projection's results and the gradient."""
    monkeypatch.setattr(logits, "BLOCK_NUMBERS", 10 * 3000)
    assert peak_bytes(work(dtype, asked), tmp_path / "trace.json") < chunks * 300 * 3000 * 4


def test_the_memory_measure_detects_a_second_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the exponentials of a whole chunk at once."""
    monkeypatch.setattr(logits, "BLOCK_NUMBERS", 300 * 3000)
    assert peak_bytes(work(torch.float32, "no"), tmp_path / "trace.json") > 1.9 * 300 * 3000 * 4
