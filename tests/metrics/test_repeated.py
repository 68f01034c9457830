"""avg@n, pass@k and maj@n by hand, and pass@k by enumeration."""

from __future__ import annotations

import itertools
import math

import pytest

from hpcrl.metrics.repeated import PromptScores, average, majority, pass_at, reported_k


def answered(right: int, wrong: int, extracted: str | None = None) -> PromptScores:
    scores = [1.0] * right + [0.0] * wrong
    return PromptScores(scores, list(extracted) if extracted is not None else [None] * len(scores))


def test_averages_and_standard_errors_are_those_of_prompts() -> None:
    mean, stderr = average([answered(4, 0), answered(2, 2), answered(0, 4)])
    assert (mean, stderr) == (0.5, pytest.approx(math.sqrt(0.25 / 3)))  # variance of 1, .5, 0 is .25
    assert math.isnan(average([answered(1, 1)]).stderr)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_response() -> None:
    for right, wrong in ((0, 5), (1, 4), (2, 3), (5, 0)):
        scores = answered(right, wrong).scores
        for k in range(1, 6):
            subsets = list(itertools.combinations(scores, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at(k, [answered(right, wrong)]).mean == pytest.approx(expected, abs=1e-12)
    assert pass_at(3, [answered(2, 3), answered(0, 5)]).mean == pytest.approx(0.45)


def test_pass_at_k_of_thousands_of_responses_is_exact() -> None:
    assert pass_at(1, [answered(3, 9997)]).mean == pytest.approx(3e-4, rel=1e-12)


def test_k_above_n_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pass@3 needs at least 3 responses to each prompt, got 2"):
        pass_at(3, [answered(1, 1)])


def test_the_most_frequent_answer_counts() -> None:
    assert majority([answered(2, 1, "aab")]).mean == 1
    assert majority([answered(1, 2, "abb")]).mean == 0
    assert majority([answered(1, 1, "ab")]).mean == 0.5  # a tie
    no_answer = PromptScores([1.0, 0.0, 0.0], ["a", None, None])
    assert majority([no_answer]).mean == 1 and majority([answered(0, 2)]).mean == 0


def test_reported_k_are_powers_of_two_and_n() -> None:
    assert [reported_k(n) for n in (1, 2, 3, 8, 12)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]
