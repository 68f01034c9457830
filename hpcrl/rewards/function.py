"""A user's reward function, called the way verl, TRL, OpenRLHF or hpcrl would call it."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import RewardConfig
from hpcrl.rewards.base import RewardItem, Score

# signature -> the parameter names it is recognised by
SIGNATURES = {
    "verl": ("solution_str", "ground_truth"),
    "trl": ("completions",),
    "openrlhf": ("queries", "prompts", "labels"),
    "hpcrl": ("items",),
}


class FunctionReward:
    """Calls `function`, `package.module:callable` or `path/to/file.py:callable`, sync or async.

    verl:     f(data_source, solution_str, ground_truth, extra_info=None) -> float or dict with "score"
    trl:      f(prompts, completions, **columns) -> list of float or None
    openrlhf: f(queries, prompts, labels, **kw) -> dict with "rewards", maybe "scores" and "extra_logs", or the rewards
    hpcrl:    f(items: list[RewardItem]) -> list of Score or float
    `options` are passed on as keyword arguments; `conversational` is ours: under trl a prompt and a completion are a
    list of one message instead of text. A class is made an object first, without arguments.
    """

    inline = False

    def __init__(self, config: RewardConfig):
        """ValueError says why the function cannot be loaded or how its parameters differ from the known ones."""
        if not config.function:
            raise ValueError("name=function needs a function, package.module:callable or file.py:callable")
        self._function = load_function(config.function)
        self.signature = recognise(self._function, config.signature, config.function)
        self.batched = self.signature != "verl"
        self._options = {name: value for name, value in config.options.items() if name != "conversational"}
        self._conversational = bool(config.options.get("conversational"))

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        call = {"verl": self._verl, "trl": self._trl, "openrlhf": self._openrlhf, "hpcrl": self._hpcrl}[self.signature]
        return call(items)

    def _verl(self, items: Sequence[RewardItem]) -> list[Score]:
        scores = []
        for item in items:
            result = self._call(
                data_source=item.extra.get("data_source", item.domain),
                solution_str=item.response,
                ground_truth=item.answer,
                extra_info=item.extra.get("extra_info") or item.extra,
            )
            if isinstance(result, dict):
                value = _number(result.get("score"), "the dict's score")
                rest = {k: float(v) for k, v in result.items() if k != "score" and isinstance(v, bool | int | float)}
                scores.append(Score(value, value, metrics=rest))
            else:
                scores.append(as_score(result))
        return scores

    def _trl(self, items: Sequence[RewardItem]) -> list[Score]:
        keys = dict.fromkeys(key for item in items for key in item.extra)
        columns: dict[str, list[Any]] = {key: [item.extra.get(key) for item in items] for key in keys}
        columns.setdefault("answer", [item.answer for item in items])
        columns["prompts"] = [self._turn("user", item.prompt) for item in items]
        columns["completions"] = [self._turn("assistant", item.response) for item in items]
        result = self._call(**columns)
        return [Score(0.0, 0.0) if value is None else as_score(value) for value in _list(result, len(items))]

    def _turn(self, role: str, text: str) -> Any:
        return [{"role": role, "content": text}] if self._conversational else text

    def _openrlhf(self, items: Sequence[RewardItem]) -> list[Score]:
        result = self._call(
            queries=[item.prompt + item.response for item in items],
            prompts=[item.prompt for item in items],
            labels=[item.answer for item in items],
        )
        if not isinstance(result, dict):
            return [as_score(value) for value in _list(result, len(items))]
        rewards = [_number(value, "a reward") for value in _list(result.get("rewards"), len(items))]
        scores = [_number(value, "a score") for value in _list(result.get("scores", rewards), len(items))]
        logs = {key: _list(value, len(items)) for key, value in (result.get("extra_logs") or {}).items()}
        return [
            Score(reward, score, metrics={key: float(values[n]) for key, values in logs.items()})
            for n, (reward, score) in enumerate(zip(rewards, scores, strict=True))
        ]

    def _hpcrl(self, items: Sequence[RewardItem]) -> list[Score]:
        return [as_score(value) for value in _list(self._call(items=list(items)), len(items))]

    def _call(self, **arguments: Any) -> Any:
        result = self._function(**_accepted(self._function, {**arguments, **self._options}))
        return asyncio.run(_result_of(result)) if inspect.isawaitable(result) else result


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def load_function(path: str) -> Callable[..., Any]:
    """The callable of an import path or `file.py:name`. ValueError says what is missing."""
    module_name, _, name = path.rpartition(":")
    if not module_name or not name:
        raise ValueError(f"{path}: an import path is package.module:callable or file.py:callable")
    if module_name.endswith(".py"):
        module = _load_file(Path(module_name).expanduser(), path)
    else:
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise ValueError(f"{path}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"{path}: {module_name} has no {name}")
    if inspect.isclass(function):
        try:
            function = function()
        except Exception as error:
            raise ValueError(f"{path}: {name}() raised {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"{path}: {name} is not callable, it is {type(function).__name__}")
    return function


def _load_file(file: Path, path: str) -> Any:
    if not file.is_file():
        raise ValueError(f"{path}: no such file (looked in {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(file.resolve().parent))  # its neighbours can be imported, as when it is run
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: running the file failed: {type(error).__name__}: {error}") from error
    return module


def recognise(function: Callable[..., Any], signature: str, path: str) -> str:
    """The signature's name, from the configuration or from the parameter names. ValueError names the parameters."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: its parameters cannot be read ({error}); wrap it in a Python function") from error
    if signature != "auto":
        return signature
    for known, wanted in SIGNATURES.items():
        if set(wanted) <= set(names):
            return known
    forms = "; ".join(f"{known}: {', '.join(wanted)}" for known, wanted in SIGNATURES.items())
    raise ValueError(
        f"{path}: parameters ({', '.join(names)}) fit no known signature ({forms}); set reward.*.signature"
    )


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def as_score(value: Any) -> Score:
    """A function's result as a Score. TypeError when it is neither a Score nor a number."""
    if isinstance(value, Score):
        return value
    number = _number(value, "the result")
    return Score(number, number)


def _number(value: Any, what: str) -> float:
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{what} is {type(value).__name__} {str(value)[:40]!r}, not a number")
    return float(value)


def _list(value: Any, count: int) -> list[Any]:
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple):
        raise TypeError(f"the function returned {type(value).__name__} instead of a list of {count}")
    if len(values) != count:
        raise ValueError(f"the function returned {len(values)} results for {count} responses")
    return list(values)
