"""Calls a reward, turning every failure into scores with an error."""

from __future__ import annotations

import asyncio
import inspect
import math
import sysconfig
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from hpcrl.rewards.reward import MAX_TOKEN_REWARDS, Reward, RewardItem, Score
from hpcrl.spec.trajectory import MAX_REWARD
from hpcrl.system.clock import AwakeClock

MAX_ERROR_CHARS = 300
READS = 8  # clock reads per timeout
SUM_TOLERANCE = 1e-5
"""Tolerance relative to the sum of magnitudes, for float32 sums of many parts."""


PACKAGE = Path(__file__).parents[2]
LIBRARIES = (PACKAGE, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
RAISED = (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError)
"""Exceptions that user code may raise: the sample fails, but the process that runs the code continues."""


def describe(error: BaseException) -> str:
    """One line that describes an exception of user code, with file and line."""
    try:
        said = str(error)
    except Exception:
        said = "its message cannot be read"
    return sendable(" ".join(f"{type(error).__name__}: {said}".split())) + _place_of(error)


def _place_of(error: BaseException) -> str:
    """File and line of the user code that raised, or that called the library that raised; empty if hpcrl raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or Path(frames[-1].filename).is_relative_to(PACKAGE):
        return ""
    own = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(path) for path in LIBRARIES)]
    place = (own or frames)[-1]
    return f" ({Path(place.filename).name}:{place.lineno})"


def sendable(text: str) -> str:
    """A text from user code, shortened and without characters that cannot be sent."""
    return text[:MAX_ERROR_CHARS].encode(errors="replace").decode()


def failed(error: str) -> Score:
    """The score of a response that could not be scored."""
    return Score(0.0, 0.0, error=error)


def score_each(reward: Reward, items: Sequence[RewardItem]) -> list[Score] | None:
    """A score per item. None if a call with several items failed as a whole: call again with each item separately."""
    try:
        scores = reward.score(items)
        return _one_each(items, asyncio.run(_awaited(scores)) if inspect.isawaitable(scores) else scores)
    except RAISED as error:
        return _failure(reward, items, describe(error))


async def score_each_async(reward: Reward, items: Sequence[RewardItem], timeout_s: float) -> list[Score] | None:
    """As score_each(), for a reward whose score() is a coroutine, which is cancelled after the timeout; time in which
    the job is suspended does not count."""
    limit = asyncio.timeout(None)
    ending = asyncio.create_task(_end_after(limit, timeout_s))
    try:
        async with limit:
            scores = reward.score(items)
            assert inspect.isawaitable(scores)
            return _one_each(items, await scores)
    except RAISED as error:
        late = isinstance(error, TimeoutError) and limit.expired()
        return _failure(reward, items, f"timeout after {timeout_s:g} s" if late else describe(error))
    finally:
        ending.cancel()


async def _end_after(limit: asyncio.Timeout, timeout_s: float) -> None:
    clock = AwakeClock(timeout_s)
    while (left_s := timeout_s - clock.now()) > 0:
        await asyncio.sleep(min(left_s, timeout_s / READS))
    limit.reschedule(asyncio.get_running_loop().time())


async def _awaited(scores: Awaitable[Sequence[Score]]) -> Sequence[Score]:
    return await scores


def _one_each(items: Sequence[RewardItem], scores: Sequence[Score]) -> list[Score]:
    if len(scores) != len(items):
        raise ValueError(f"the reward returned {len(scores)} scores for {len(items)} responses")
    return [_checked(item, score) for item, score in zip(items, scores, strict=True)]


def _failure(reward: Reward, items: Sequence[RewardItem], error: str) -> list[Score] | None:
    whole = len(items) == 1 or reward.scores == "groups"  # group members are not scored one by one
    return [failed(error)] * len(items) if whole else None


def _checked(item: RewardItem, score: Any) -> Score:
    if not isinstance(score, Score):
        return failed(f"the reward returned {type(score).__name__} instead of a Score")
    try:
        reward, value = float(score.reward), float(score.score)
        metrics = {sendable(str(name)): float(number) for name, number in score.metrics.items()}
        turns = tuple(map(float, score.turn_rewards))
        tokens = {int(place): float(number) for place, number in sorted(score.token_rewards.items())}
        given, gold = (None if part is None else str(part) for part in (score.extracted, score.ground_truth))
    except Exception as error:
        return failed(describe(error))
    for number in (reward, value):
        if not math.isfinite(number):
            return failed(f"the reward returned {number}")
        if abs(number) > MAX_REWARD:
            return failed(f"the reward returned {number:g}, but at most {MAX_REWARD:g} is allowed")
    if problem := _problem_of_parts(item, reward, turns, tokens):
        return failed(problem)
    finite = {name: number for name, number in metrics.items() if math.isfinite(number)}
    text = sendable(str(score.error))
    return Score(reward, value, text, finite, turns or _of_turns(item, tokens), tokens, given, gold)


def _problem_of_parts(item: RewardItem, reward: float, turns: Sequence[float], tokens: Mapping[int, float]) -> str:
    """Why these cannot be the rewards of the item's turns or tokens; empty if they can."""
    if not (turns or tokens):
        return ""
    name, count = ("turn_rewards", len(item.turns)) if turns else ("token_rewards", _lengths(item)[-1])
    parts = turns or list(tokens.values())
    if turns and tokens:
        return "the reward gave turn_rewards and token_rewards, but a response can have only one"
    if turns and len(turns) != count:
        return f"the reward gave {len(turns)} turn_rewards for {count} model turns"
    if len(tokens) > MAX_TOKEN_REWARDS:
        return f"the reward gave {len(tokens)} token_rewards, but a response can have {MAX_TOKEN_REWARDS}"
    if outside := [place for place in tokens if not 0 <= place < count]:
        return f"the reward gave token_rewards[{outside[0]}], but the response has {count} model tokens here"
    if not all(map(math.isfinite, parts)):
        return f"the reward gave {name} that are not finite"
    if max(map(abs, parts)) > MAX_REWARD:
        return f"the reward gave {name} above {MAX_REWARD:g}"
    if abs(math.fsum(parts) - reward) > SUM_TOLERANCE * max(1.0, math.fsum(map(abs, parts))):
        return f"the {name} add up to {math.fsum(parts):.9g}, but the reward is {reward:.9g}"
    return ""


def _of_turns(item: RewardItem, tokens: Mapping[int, float]) -> tuple[float, ...]:
    """The rewards of the turns as sums of their token rewards; empty without token rewards."""
    ends = _lengths(item) if tokens else []
    return tuple(
        math.fsum(number for place, number in tokens.items() if start <= place < end)
        for start, end in zip([0, *ends], ends, strict=False)
    )


def _lengths(item: RewardItem) -> list[int]:
    """Number of the model's tokens up to the end of each turn."""
    return list(accumulate(len(turn.token_ids) for turn in item.turns))
