"""Wraps scoring objects of other libraries as reward functions with hpcrl's signature, function(items).

verifiers: a Rubric, whose score_rollout(state) and score_group(states) write reward and metrics into each state (tested
with 0.1.14; 0.4 has no rubrics). NeMo-RL: an environment, whose step(message_log_batch, metadata) returns rewards
(written from its source, not run: its package is not on PyPI).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcrl.rewards.reward import RewardItem, Score

RUBRIC = ("score_rollout", "score_group")
ENVIRONMENT = ("step", "global_post_process_and_metrics")


def adapted(found: Any, path: str) -> Callable[..., Any]:
    """A scoring function if `found` is a rubric, an environment, or a function without parameters that returns either;
    else `found` itself. ValueError if that function raises or the object cannot be used."""
    made = found
    if callable(found) and not _has(found, RUBRIC) and not _has(found, ENVIRONMENT) and _takes_nothing(found):
        try:
            made = found()
        except Exception as error:
            raise ValueError(f"{path}: the function raised {type(error).__name__}: {error}") from error
    if _has(made, RUBRIC):
        return RubricFunction(made, path)
    if _has(made, ENVIRONMENT):
        return EnvironmentFunction(made, path)
    return found  # type: ignore[no-any-return]


def _has(found: Any, methods: Sequence[str]) -> bool:
    return not inspect.isclass(found) and all(callable(getattr(found, name, None)) for name in methods)


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


class RubricFunction:
    """Scores with a verifiers Rubric. If one of its functions compares group members, a prompt's group is scored in
    one call; if one is a coroutine function, the reward is asynchronous. The functions get the row's columns by name.
    verifiers turns a function's exception into 0 and a log line."""

    def __init__(self, rubric: Any, path: str):
        if list(inspect.signature(rubric.score_rollout).parameters) != ["state"]:
            raise ValueError(f"{path}: this version of verifiers scores no states; 0.1.14 does")
        self._rubric = rubric
        self.scores = "groups" if rubric.has_group_rewards else "samples"
        self.pool = "async" if any(map(inspect.iscoroutinefunction, rubric.funcs)) else "process"

    async def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        states = [_state(item) for item in items]
        if self.scores == "groups":
            await self._rubric.score_group(states)
        else:
            await asyncio.gather(*map(self._rubric.score_rollout, states))
        return [_score(state["reward"], state["metrics"]) for state in states]


def _state(item: RewardItem) -> dict[str, Any]:
    """The rollout state that a rubric reads."""
    prompt, response = _dialogue(item)
    row = {"prompt": prompt, "answer": "" if item.answer is None else item.answer, "example_id": item.sample_id}
    row |= {"info": item.extra.get("info", {}), "task": item.extra.get("task", item.domain)}
    columns = {key: value for key, value in item.extra.items() if key != "messages"}
    ended = {"completion": response, "is_completed": True, "is_truncated": item.finish_reason == "length"}
    return row | ended | {"input": columns | row, "trajectory": [], "timing": {}, "error": None}


def _dialogue(item: RewardItem) -> tuple[list[Any], list[Any]]:
    """The prompt's messages, and all later messages."""
    prompt = list(item.messages) or [{"role": "user", "content": item.prompt}]
    played = item.extra.get("messages")
    if item.messages and isinstance(played, Sequence) and len(played) > len(prompt):
        return prompt, list(played[len(prompt) :])
    return prompt, [{"role": "assistant", "content": turn.text} for turn in item.turns]


def _score(reward: Any, metrics: Mapping[str, Any]) -> Score:
    return Score(float(reward), float(reward), metrics={name: float(value) for name, value in metrics.items()})


class EnvironmentFunction:
    """Scores with one step of a NeMo-RL environment. The metadata is the row's `extra_env_info`, or else the row's
    columns plus the answer as `ground_truth`."""

    def __init__(self, environment: Any, path: str):
        if hasattr(environment.step, "remote"):
            raise ValueError(
                f"{path}: it is a Ray actor, but hpcrl does not use Ray; return an instance of the class itself"
            )
        self._step = environment.step

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        logs = [[*prompt, *response] for prompt, response in map(_dialogue, items)]
        told = [item.extra.get("extra_env_info") or {"ground_truth": item.answer, **item.extra} for item in items]
        rewards = self._step(logs, told).rewards.tolist()
        return [_score(reward, {}) for reward in rewards]
