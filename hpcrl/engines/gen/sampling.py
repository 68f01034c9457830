"""Sample one token per row: inverse CDF over the (truncated) softmax, with one uniform number per token.

A row's uniform number depends only on its seed and its number of drawn tokens, so a response does not depend on other
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcrl.rollout.device_copies import to_device

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MASK64 = (1 << 64) - 1
UNITS = 2.0**30
"""Units in a probability of 1. Rounding may make a row's sum a little larger, which still fits in 32 bits."""


def mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), elementwise on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream_origin(seed: int, start: int) -> np.uint64:
    """The origin, for uniforms(), of the stream of `seed` whose first number is drawn at iteration `start`."""
    x = seed & MASK64  # mix64 in Python integers: ten times faster for a single number
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return np.uint64(((x ^ (x >> 31)) - start * int(GOLDEN)) & MASK64)


def uniforms(origins: np.ndarray, iteration: int) -> np.ndarray:
    """float32 [R] in [0, 1): this iteration's numbers from the streams with these origins (uint64 [R]). A stream's n-th
    number depends only on (seed, n). The largest number is about 1 - 2^-22, so `uniform * total` is below `total` in
    float32."""
    bits = mix64(origins + np.array([iteration + 1], dtype=np.uint64) * GOLDEN) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32((1 - 2.0**-22) * 2.0**-24)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Sampling parameters of R rows, of which r have truncation; a field that no row needs is None."""

    temperatures: Tensor | None  # float32 [R, 1]
    greedy: Tensor | None  # bool [R]
    truncated: Tensor | None  # int64 [r], the rows with truncation
    top_k: Tensor  # int64 [r, 1]; the vocabulary size turns it off
    top_p: Tensor  # float32 [r, 1]; a value above 1 turns it off
    min_p: Tensor  # float32 [r, 1]

    @classmethod
    def build(
        cls,
        *,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        num_live: int,
        vocab_size: int,
        device: torch.device,
    ) -> SamplingPlan:
        """The plan for rows with these parameters, [R] each; temperature 0 is greedy. Rows after num_live are free."""
        greedy = temperature == 0
        limits = (top_k > 0) | (top_p < 1) | (min_p > 0)
        rows = np.flatnonzero((limits & ~greedy)[:num_live])
        divisor = np.where(greedy, 1, temperature).astype(np.float32)
        k = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)[rows]
        p = np.where(top_p < 1, top_p, 2)[rows].astype(np.float32)

        def on_device(values: np.ndarray) -> Tensor:
            return to_device(torch.from_numpy(values), device)

        def column(values: np.ndarray) -> Tensor:
            return on_device(values)[:, None]

        return cls(
            temperatures=column(divisor) if (divisor[:num_live] != 1).any() else None,
            greedy=on_device(greedy) if greedy[:num_live].any() else None,
            truncated=on_device(rows) if len(rows) else None,
            top_k=column(k),
            top_p=column(p),
            min_p=column(min_p[rows].astype(np.float32)),
        )


def sample(logits: Tensor, plan: SamplingPlan, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns token ids int64 [R], their log-softmax(logits / T) float32 [R], and these log-probs renormalised over the
    tokens that truncation keeps (the same tensor if no row truncates).

    Args:
        logits: float32 [R, vocab]. They are overwritten.
        uniform: float32 [R] in [0, 1), one random number per row.
    """
    if plan.temperatures is not None:
        logits.div_(plan.temperatures)
    probs = logits.softmax(-1)
    kept = probs
    if plan.truncated is not None:
        part = truncate(probs[plan.truncated], plan.top_k, plan.top_p, plan.min_p)
        kept = probs.index_copy(0, plan.truncated, part)
    # All rows, truncated or not, use vocabulary order, because a row's token must not depend on other rows.
    summands = in_units(kept)
    cumulative = summands.cumsum(-1, dtype=summands.dtype)
    total = cumulative[:, -1:]
    if summands is kept:
        drawn = uniform[:, None] * total
    else:
        drawn, total = (uniform[:, None].double() * total).int(), kept.sum(-1, keepdim=True)
    ids = torch.searchsorted(cumulative, drawn, right=True)
    ids.clamp_(max=logits.shape[1] - 1)  # only needed for a row of NaN, whose log-prob is then NaN
    if plan.greedy is not None:
        ids = torch.where(plan.greedy[:, None], probs.max(-1, keepdim=True).indices, ids)  # faster than argmax
    logprobs = probs.gather(1, ids).log_()[:, 0]
    behaviour = logprobs if kept is probs else (kept.gather(1, ids) / total).log_()[:, 0]
    return ids[:, 0], logprobs, behaviour


def in_units(probs: Tensor) -> Tensor:
    """Probabilities as numbers whose running sums are equal in every run: unchanged on a CPU, elsewhere int32 in units
    of 2^-30, which are finer than the 24 bits of uniform numbers."""
    return probs if adds_in_order(probs.device) else (probs * UNITS).int()


def adds_in_order(device: torch.device) -> bool:
    """Whether running sums of floats are computed in a fixed order."""
    return device.type == "cpu"


def truncate(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`probs` [r, vocab] with zeros for tokens that are dropped by top-k, then by top-p (arXiv 1904.09751) among the
    rest, then by min-p (arXiv 2407.01082); not renormalised. The most probable token is kept, and so are ties with the
    last kept token. Parameters are as in SamplingPlan."""
    vocab = probs.shape[1]
    values = _descending(probs)
    summands = in_units(values)
    cumulative = summands.cumsum(-1, dtype=summands.dtype)
    mass = torch.where(top_k < vocab, cumulative.gather(1, top_k - 1), 1.0 if summands is values else UNITS)
    keep = torch.arange(vocab, device=probs.device) < top_k
    keep &= cumulative - summands < top_p * mass
    keep &= values >= min_p * values[:, :1]
    smallest = values.gather(1, keep.sum(-1, keepdim=True) - 1)  # `keep` is a prefix
    return torch.where(probs >= smallest, probs, 0.0)


def _descending(probs: Tensor) -> Tensor:
    """Sort each row in descending order; on a CPU by numpy, which is about twenty times faster here than torch."""
    if probs.device.type != "cpu":
        return probs.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
