"""Paired differences by hand, and as scipy and statsmodels compute them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hpcrl.metrics.paired import bootstrap_interval, mcnemar, paired_difference


def test_a_difference_is_that_of_the_prompts() -> None:
    found = paired_difference([1.0, 0.5, 0.0, 1.0], [1.0, 1.0, 0.25, 0.0])
    assert (found.num_prompts, found.mean_a, found.mean_b, found.difference) == (4, 0.625, 0.5625, -0.0625)
    # Differences 0, .5, .25, -1: sum of squares 1.3125, less 4 x .0625^2, over 3, over 4.
    assert found.stderr == pytest.approx(math.sqrt((1.3125 - 4 * 0.0625**2) / 3 / 4), rel=1e-12)
    assert (found.lost, found.gained) == (1, 0), "a mean of .5 is right"


def test_the_order_of_prompts_matters_only_in_pairs() -> None:
    a, b = [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]
    assert paired_difference(a, b).interval == (0.0, 0.0) and paired_difference(a, b).stderr == 0
    crossed = paired_difference(a, b[::-1])
    assert crossed.difference == 0 and crossed.interval is not None and crossed.interval[0] < 0 < crossed.interval[1]


def test_a_single_prompt_has_no_interval() -> None:
    found = paired_difference([0.0], [1.0])
    assert (found.difference, found.stderr, found.interval, found.gained) == (1.0, None, None, 1)


def test_unequal_sides_are_refused() -> None:
    for a, b in (([], []), ([1.0], [])):
        with pytest.raises(ValueError, match=f"got {len(a)} and {len(b)}"):
            paired_difference(a, b)


@pytest.mark.parametrize(
    ("ones", "zeros", "low", "high"),
    [
        (1, 3, 0, 3),  # Binomial(4, 1/4): P(0) = .316; P(<= 2) = .949, P(<= 3) = .996
        (5, 5, 2, 8),  # Binomial(10, 1/2): P(<= 1) = .011, P(<= 2) = .055
        (15, 15, 10, 20),  # Binomial(30, 1/2): P(<= 9) = .021, P(<= 10) = .049; drawn as counts
    ],
)
def test_the_interval_is_that_of_resampled_sums(ones: int, zeros: int, low: int, high: int) -> None:
    n = ones + zeros
    values = np.array([1.0] * ones + [0.0] * zeros)
    assert bootstrap_interval(values) == pytest.approx((low / n, high / n), abs=1e-12)
    assert bootstrap_interval(values) == bootstrap_interval(values)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        # scipy.stats.bootstrap of scipy 1.17.1 with method="percentile" and 200,000 resamples
        ([float(k * k % 7 > 3) - float(k * k % 5 > 3) for k in range(100)], -0.25, 0.01),
        ([(k * 37 % 15 - 7) / 7 + k % 11 / 50 for k in range(100)], -0.01726, 0.22889),
    ],
)
def test_the_interval_is_scipys(values: list[float], low: float, high: float) -> None:
    assert bootstrap_interval(np.array(values)) == pytest.approx((low, high), abs=0.04 * (high - low))


def test_mcnemar_counts_the_tails_of_fair_coins() -> None:
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1
    assert mcnemar(1, 5) == mcnemar(5, 1) == 2 * (1 + 6) / 64
    assert mcnemar(0, 10) == 2 / 1024
    assert mcnemar(5000, 5200) == pytest.approx(0.0488, abs=5e-4)  # normal: (199 / 101)^2, continuity corrected


@pytest.mark.parametrize(
    ("lost", "gained", "p_value"),
    [
        (0, 7, 0.015625),
        (12, 30, 0.007915897334896727),
        (400, 431, 0.2980162066751779),
        (7000, 7400, 0.0008835717603852888),
    ],
)
def test_mcnemar_is_scipys_and_statsmodels(lost: int, gained: int, p_value: float) -> None:
    """Of scipy.stats.binomtest of scipy 1.17.1, and of statsmodels 0.15.0 with exact=True, which agree."""
    assert mcnemar(lost, gained) == pytest.approx(p_value, rel=1e-9)
