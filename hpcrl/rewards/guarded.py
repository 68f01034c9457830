"""Calling a reward so that whatever it does wrong is in its scores."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Sequence
from typing import Any

from hpcrl.rewards.base import Reward, RewardItem, Score

MAX_ERROR_CHARS = 300


def describe(error: BaseException) -> str:
    """One line that says what was raised."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARS]


def failed(error: str) -> Score:
    """The score of a response that could not be scored."""
    return Score(0.0, 0.0, error=error)


def score_each(reward: Reward, items: Sequence[RewardItem]) -> list[Score] | None:
    """A score per item. None when the call failed for several items as a whole: call again with each alone."""
    try:
        scores = reward.score(items)
        return _one_each(items, asyncio.run(_awaited(scores)) if inspect.isawaitable(scores) else scores)
    except (Exception, SystemExit) as error:  # sys.exit() in a reward ends a sample, not its process
        return _failure(reward, items, describe(error))


async def score_each_async(reward: Reward, items: Sequence[RewardItem], timeout_s: float) -> list[Score] | None:
    """The same of a reward whose score() is a coroutine, which is cancelled after the timeout."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            scores = reward.score(items)
            assert inspect.isawaitable(scores)
            return _one_each(items, await scores)
    except (Exception, SystemExit) as error:
        late = isinstance(error, TimeoutError) and limit.expired()
        return _failure(reward, items, f"timeout after {timeout_s:g} s" if late else describe(error))


async def _awaited(scores: Awaitable[Sequence[Score]]) -> Sequence[Score]:
    return await scores


def _one_each(items: Sequence[RewardItem], scores: Sequence[Score]) -> list[Score]:
    if len(scores) != len(items):
        raise ValueError(f"the reward returned {len(scores)} scores for {len(items)} responses")
    return [_checked(score) for score in scores]


def _failure(reward: Reward, items: Sequence[RewardItem], error: str) -> list[Score] | None:
    whole = len(items) == 1 or reward.scores == "groups"  # siblings make no sense one by one
    return [failed(error)] * len(items) if whole else None


def _checked(score: Any) -> Score:
    if not isinstance(score, Score):
        return failed(f"the reward returned {type(score).__name__} instead of a Score")
    try:
        reward, value = float(score.reward), float(score.score)
        metrics = {str(name): float(number) for name, number in score.metrics.items()}
    except Exception as error:
        return failed(describe(error))
    if not (math.isfinite(reward) and math.isfinite(value)):
        return failed(f"the reward returned {value if math.isfinite(reward) else reward}")
    finite = {name: number for name, number in metrics.items() if math.isfinite(number)}
    return Score(reward, value, str(score.error)[:MAX_ERROR_CHARS], finite, score.given, score.gold)
