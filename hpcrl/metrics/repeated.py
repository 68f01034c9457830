"""Accuracy over several responses to each prompt: avg@n, pass@k and maj@n, with standard errors over prompts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple


class PromptScores(NamedTuple):
    """A prompt's responses: their scores, and the answers that the reward found in them (None: no answer)."""

    scores: Sequence[float]
    extracted: Sequence[str | None]

    @property
    def num_right(self) -> int:
        """Number of right responses, those with a score above 0."""
        return sum(score > 0 for score in self.scores)


class Estimate(NamedTuple):
    """A mean over prompts, and its standard error; nan for a single prompt."""

    mean: float
    stderr: float


def average(prompts: Sequence[PromptScores]) -> Estimate:
    """avg@n: the mean of each prompt's mean score."""
    return _over_prompts([fmean(prompt.scores) for prompt in prompts])


def pass_at(k: int, prompts: Sequence[PromptScores]) -> Estimate:
    """pass@k: the probability that at least one of k responses is right, estimated without bias from n >= k responses
    (arXiv 2107.03374)."""
    return _over_prompts([_pass_at(k, len(prompt.scores), prompt.num_right) for prompt in prompts])


def majority(prompts: Sequence[PromptScores]) -> Estimate:
    """maj@n: the score of the most frequent answer (arXiv 2203.11171); the mean over equally frequent answers, and 0 if
    no response has an answer. Answers are equal if their texts are. An answer's score is the mean of its responses'."""
    return _over_prompts([_majority(prompt) for prompt in prompts])


def reported_k(num_samples: int) -> list[int]:
    """The k for which pass@k is reported: powers of two up to n, and n; k=1 is avg@n."""
    return sorted({2**i for i in range(1, num_samples.bit_length())} | ({num_samples} if num_samples > 1 else set()))


def _pass_at(k: int, n: int, right: int) -> float:
    if not 0 < k <= n:
        raise ValueError(f"pass@{k} needs at least {k} responses to each prompt, got {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def _majority(prompt: PromptScores) -> float:
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for score, answer in zip(prompt.scores, prompt.extracted, strict=True):
        if answer is not None:
            scores[answer].append(score)
    most = max(map(len, scores.values()), default=0)
    return fmean(fmean(votes) for votes in scores.values() if len(votes) == most) if most else 0.0


def _over_prompts(values: Sequence[float]) -> Estimate:
    return Estimate(fmean(values), math.sqrt(variance(values) / len(values)) if len(values) > 1 else math.nan)
