"""The largest of all ranks' token values, without gathering them.

The choice depends neither on the ranks that hold the tokens nor on the order of rows: equal values are ordered by a
number derived from the sample and the token's position in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.interface import AllSum

DIGIT_BITS, DIGITS = 8, 8
TIE_BITS = 31
MULTIPLIERS = (6364136223846793005, 1442695040888963407, -4658895280553007687)
"""Constants of the hash: Knuth's MMIX, and one of SplitMix64 (Steele, Lea and Flood 2014)."""


def token_numbers(rows: Tensor, sample_ids: Tensor) -> Tensor:
    """int64 [M], 0 to 2^31 - 1: a pseudo-random number of each model token, equal in every batch. rows int64 [M],
    sorted; sample_ids int64 [B]."""
    places = torch.arange(len(rows), device=rows.device)
    places = places - torch.searchsorted(rows, rows)
    coefficients = sample_ids[rows] * MULTIPLIERS[0] + (places + 1) * MULTIPLIERS[1]
    for shift in (30, 27):
        coefficients = (coefficients ^ ((coefficients >> shift) & ((1 << (64 - shift)) - 1))) * MULTIPLIERS[2]
    return (coefficients >> (64 - TIE_BITS)) & ((1 << TIE_BITS) - 1)


def largest(values: Tensor, coefficients: Tensor, count: int, all_sum: AllSum) -> Tensor:
    """bool [M]: whether a value is one of the `count` largest of all ranks (all values if there are fewer); among equal
    values, the largest token_numbers are chosen. values: float [M], compared in float32. Selects digit by digit, from
    the most significant one, by counts over all ranks. Collective over the ranks of all_sum; a rank may hold no
    values."""
    keys = (_ordered(values) << TIE_BITS) + coefficients
    chosen, undecided = torch.zeros_like(keys, dtype=torch.bool), torch.ones_like(keys, dtype=torch.bool)
    left = min(count, int(all_sum(undecided.sum())))
    for digit in reversed(range(DIGITS)):
        digits = (keys >> (DIGIT_BITS * digit)) & ((1 << DIGIT_BITS) - 1)
        counts = all_sum(torch.bincount(digits[undecided], minlength=1 << DIGIT_BITS))
        at_least = counts.flip(0).cumsum(0).flip(0)
        if not left:
            return chosen
        last = int((at_least >= left).nonzero().max())
        left -= int(at_least[last] - counts[last])
        chosen |= undecided & (digits > last)
        undecided &= digits == last
    return chosen | undecided


def _ordered(values: Tensor) -> Tensor:
    """int64 [M], 0 to 2^32 - 1, in the order of the values."""
    bits = (values.float() + 0.0).view(torch.int32)  # the sum turns -0 into 0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() + (1 << 31)
