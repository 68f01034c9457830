"""Two models on the same prompts: the paired difference with its interval, and the prompts that changed side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES, SEED = 10_000, 0
"""Of the bootstrap."""
LEVEL = 0.95
RIGHT = 0.5
"""A prompt is right if the mean score of its responses is at least this."""
MAX_DRAWN = 1 << 22
"""Numbers that the bootstrap draws at once."""
FEW = 10
"""Values to each different value, from which the bootstrap draws their counts instead of values."""


class PairedDifference(NamedTuple):
    """Of `num_prompts` prompts that both sides answered: the sides' mean scores, and B minus A."""

    num_prompts: int
    mean_a: float
    mean_b: float
    difference: float
    stderr: float | None
    """Standard error of `difference`: the standard deviation of the prompts' differences, divided by the square root of
    their number; None for a single prompt."""
    interval: tuple[float, float] | None
    """95 % interval of `difference`; None for a single prompt."""
    lost: int
    """Prompts that A has right and B wrong."""
    gained: int
    """Prompts that A has wrong and B right."""


def paired_difference(a: Sequence[float], b: Sequence[float]) -> PairedDifference:
    """Compare mean scores of the same prompts, one value each. ValueError without a prompt."""
    if not a or len(a) != len(b):
        raise ValueError(f"expected a score of both sides for at least one prompt, got {len(a)} and {len(b)}")
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    differences = second - first
    stderr = float(differences.std(ddof=1)) / math.sqrt(len(a)) if len(a) > 1 else None
    interval = bootstrap_interval(differences) if len(a) > 1 else None
    right_a, right_b = first >= RIGHT, second >= RIGHT
    return PairedDifference(
        len(a),
        float(first.mean()),
        float(second.mean()),
        float(differences.mean()),
        stderr,
        interval,
        int((right_a & ~right_b).sum()),
        int((~right_a & right_b).sum()),
    )


def bootstrap_interval(values: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the mean of float64 [n] values: quantiles of the means of RESAMPLES samples of n values,
    drawn with replacement (percentile bootstrap, Efron 1979). The same values give the same interval."""
    found, counts = np.unique(values, return_counts=True)
    stream = np.random.RandomState(SEED)  # its streams are frozen; those of numpy's Generator are not
    # With few different values, as of a single response each, it is faster to draw how often a resample has each value.
    few = FEW * len(found) < len(values)
    rows = max(1, MAX_DRAWN // len(found if few else values))
    means = []
    for start in range(0, RESAMPLES, rows):
        size = min(rows, RESAMPLES - start)
        if few:
            means.append(stream.multinomial(len(values), counts / len(values), size=size) @ found / len(values))
        else:
            means.append(values[stream.randint(len(values), size=(size, len(values)))].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mcnemar(lost: int, gained: int) -> float:
    """The two-sided p-value of McNemar's exact test: the probability that of lost + gained prompts that change side, if
    either direction is equally likely, the rarer direction has at most min(lost, gained), doubled (at most 1)."""
    changed, rarer = lost + gained, min(lost, gained)
    term, total = 1, 1  # binomial coefficients, exact
    for k in range(rarer):
        term = term * (changed - k) // (k + 1)
        total += term
    return min(1.0, float(_ratio(2 * total, changed)))


def _ratio(count: int, bits: int) -> float:
    """count / 2**bits, for numbers beyond the range of a float."""
    excess = max(0, count.bit_length() - 64)
    return math.ldexp(float(count >> excess), excess - bits)
