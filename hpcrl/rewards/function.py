"""A user's reward function, called with the signature of verl, TRL, OpenRLHF, NeMo-RL or hpcrl."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import RewardConfig
from hpcrl.rewards.adapted import adapted
from hpcrl.rewards.reward import Reward, RewardItem, Score
from hpcrl.rewards.serving.guarded import RAISED

# signature -> sets of parameter names, any of which identifies it
SIGNATURES: dict[str, list[tuple[str, ...]]] = {
    "verl": [("solution_str", "ground_truth"), ("predict_str", "ground_truth")],
    "verl_batched": [("solution_strs", "ground_truths")],
    "trl": [("completions",), ("completion_ids",)],
    "openrlhf": [("queries", "prompts", "labels")],
    "nemo_rl": [("ground_truth", "response")],
    "hpcrl": [("items",)],
}
SINGLE = ("verl", "nemo_rl")
"""Signatures of one response."""
# signature -> parameters of a call besides options; trl: the columns of the rows too
GIVEN = {
    "verl": {"data_source", "solution_str", "predict_str", "ground_truth", "extra_info"},
    "verl_batched": {"data_sources", "solution_strs", "ground_truths", "extra_infos"},
    "openrlhf": {"queries", "prompts", "labels"},
    "nemo_rl": {"ground_truth", "response"},
    "hpcrl": {"items"},
}
# Error texts of a function that expects messages but gets text, and the reverse.
_WANTS_MESSAGES = re.compile(r"string indices must be integers|'str' object has no attribute")
_WANTS_TEXT = re.compile(r"'(?:list|dict)' object has no attribute|expected string|must be str|not list|not dict")


class FunctionReward(Reward):
    """Calls the function at `function`, `package.module:callable` or `path/to/file.py:callable`, which may be async.

    verl:     f(data_source, solution_str, ground_truth, extra_info=None) -> float or dict with "score"; or
              f(predict_str, ground_truth), as its scorers of single data sets (geo3k)
    verl_batched: f(data_sources, solution_strs, ground_truths, extra_infos=None) -> list of float or dict with "score"
    trl:      f(prompts, completions, completion_ids, **columns) -> list of float or None
    openrlhf: f(queries, prompts, labels, **kw) -> dict with "rewards", maybe "scores" and "extra_logs", or the rewards
    nemo_rl:  f(ground_truth, response) -> (reward, whether it is right, or None)
    hpcrl:    f(items: list[RewardItem]) -> list of Score or float

    The function gets the parameters that it names, and `options` as keyword arguments. hpcrl itself reads the option
    `conversational`: whether trl's prompts and completions are lists of one message instead of text; without this
    option, hpcrl tries text, then messages if the function reads text as a message. A class is instantiated first,
    without arguments. The attributes `scores = "groups"`, `pool = "async"` and `pure = True` of the function or class
    mean the same as in hpcrl.rewards.reward.Reward.
    """

    def __init__(self, config: RewardConfig):
        """ValueError if the function cannot be loaded, or its parameters fit no known signature."""
        if not config.function:
            raise ValueError("name=function needs a function, package.module:callable or file.py:callable")
        self._path = config.function
        self._function = load_function(config.function)
        self.signature = recognise(self._function, config.signature, config.function)
        self.batched = self.signature not in SINGLE
        self.scores = self._declared("scores", ("samples", "groups"))
        self.pool = self._declared("pool", ("process", "async"))
        self.pure = self._declared("pure", (False, True))
        self._is_async = any(map(inspect.iscoroutinefunction, (self._function, type(self._function).__call__)))
        if self.scores == "groups" and not self.batched:
            raise ValueError(
                f"{self._path}: scores = 'groups' needs a signature with many responses, not {self.signature}"
            )
        if self.pool == "async" and not self._is_async:
            raise ValueError(f"{self._path}: pool = 'async' needs a function made with async def")
        self._parameters = inspect.signature(self._function).parameters
        self._options = {name: value for name, value in config.options.items() if name != "conversational"}
        conversational = config.options.get("conversational")
        self._conversational: bool | None = None if conversational is None else bool(conversational)
        self._check_parameters()

    def _check_parameters(self) -> None:
        known = GIVEN.get(self.signature)
        several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = [each for each in self._parameters.values() if each.kind not in several]
        required = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
        if known is not None and (missing := sorted(required - known - self._options.keys())):
            raise ValueError(
                f"{self._path}: signature {self.signature} gives no {', '.join(missing)}; "
                f"it gives {', '.join(sorted(known))} and reward.*.options"
            )

    def _declared(self, name: str, known: tuple[Any, ...]) -> Any:
        value = getattr(self._function, name, known[0])
        if value not in known:
            raise ValueError(f"{self._path}: {name} = {value!r}: expected {' or '.join(map(str, known))}")
        return value

    def score(self, items: Sequence[RewardItem]) -> Sequence[Score] | Awaitable[Sequence[Score]]:
        scoring: Coroutine[Any, Any, list[Score]] = getattr(self, f"_{self.signature}")(items)
        if self.pool == "async":
            return scoring
        return asyncio.run(scoring) if self._is_async else _result_without_waiting(scoring)

    async def _verl(self, items: Sequence[RewardItem]) -> list[Score]:
        return [
            _verl_score(
                await self._call(
                    data_source=_data_source(item),
                    solution_str=item.response,
                    predict_str=item.response,
                    ground_truth=item.answer,
                    extra_info=_extra_info(item),
                )
            )
            for item in items
        ]

    async def _verl_batched(self, items: Sequence[RewardItem]) -> list[Score]:
        result = await self._call(
            data_sources=[_data_source(item) for item in items],
            solution_strs=[item.response for item in items],
            ground_truths=[item.answer for item in items],
            extra_infos=[_extra_info(item) for item in items],
        )
        return [_verl_score(value) for value in _list(result, len(items))]

    async def _trl(self, items: Sequence[RewardItem]) -> list[Score]:
        keys = dict.fromkeys(key for item in items for key in item.extra)
        columns: dict[str, list[Any]] = {key: [item.extra.get(key) for item in items] for key in keys}
        columns.setdefault("answer", [item.answer for item in items])
        ids = [list(item.token_ids) for item in items]
        if "completion_ids" in self._parameters and any(item.response and not item.token_ids for item in items):
            raise ValueError("the function needs completion_ids, but the response came without token ids")
        result = await self._call_trl(items, columns | {"completion_ids": ids})
        return [Score(0.0, 0.0) if value is None else as_score(value) for value in _list(result, len(items))]

    async def _call_trl(self, items: Sequence[RewardItem], columns: dict[str, Any]) -> Any:
        """The result with prompts and completions as text or as messages, whichever the function accepts."""

        async def call(as_messages: bool) -> Any:
            turn = _message if as_messages else lambda role, text: text
            prompts = [turn("user", item.prompt) for item in items]
            return await self._call(
                **columns, prompts=prompts, completions=[turn("assistant", i.response) for i in items]
            )

        try:
            result = await call(bool(self._conversational))
        except Exception as error:
            wanted = _WANTS_TEXT if self._conversational else _WANTS_MESSAGES
            if not isinstance(error, TypeError | AttributeError) or not wanted.search(str(error)):
                raise
            if self._conversational is None:
                with contextlib.suppress(Exception):
                    result = await call(True)
                    self._conversational = True
                    return result
            other = str(not self._conversational).lower()
            raise TypeError(f"{error} (the function may need options.conversational={other})") from error
        self._conversational = bool(self._conversational)
        return result

    async def _openrlhf(self, items: Sequence[RewardItem]) -> list[Score]:
        result = await self._call(
            queries=[item.prompt + item.response for item in items],
            prompts=[item.prompt for item in items],
            labels=[item.answer for item in items],
        )
        if not isinstance(result, dict):
            return [as_score(value) for value in _list(result, len(items))]
        rewards = [_number(value, "a reward") for value in _list(result.get("rewards"), len(items))]
        given = result.get("scores")
        scores = rewards if given is None else [_number(value, "a score") for value in _list(given, len(items))]
        logs = {key: _spread(value, len(items)) for key, value in (result.get("extra_logs") or {}).items()}
        return [
            Score(reward, score, metrics={key: _number(values[n], f"extra_logs.{key}") for key, values in logs.items()})
            for n, (reward, score) in enumerate(zip(rewards, scores, strict=True))
        ]

    async def _nemo_rl(self, items: Sequence[RewardItem]) -> list[Score]:
        scores = []
        for item in items:
            result = await self._call(ground_truth=item.answer, response=item.response)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(
                    f"the function returned {type(result).__name__}, not a pair (reward, whether it is right)"
                )
            reward = _number(result[0], "the reward")
            scores.append(Score(reward, reward if result[1] is None else float(bool(result[1]))))
        return scores

    async def _hpcrl(self, items: Sequence[RewardItem]) -> list[Score]:
        return [as_score(value) for value in _list(await self._call(items=list(items)), len(items))]

    async def _call(self, **arguments: Any) -> Any:
        arguments |= self._options
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in self._parameters}
        result = self._function(**arguments)
        if not inspect.isawaitable(result):
            return result
        return await result if self._is_async else asyncio.run(_result_of(result))


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _result_without_waiting(coroutine: Coroutine[Any, Any, list[Score]]) -> list[Score]:
    """The result of a coroutine that never waits, without the cost of an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        scores: list[Score] = done.value
        return scores
    raise AssertionError("it waited")


def load_function(path: str) -> Callable[..., Any]:
    """The callable of an import path or `file.py:name`. ValueError names what is missing."""
    module_name, _, name = path.rpartition(":")
    if not module_name or not name:
        raise ValueError(f"{path}: an import path is package.module:callable or file.py:callable")
    module = load_module(module_name, path)
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"{path}: {module_name} has no {name}")
    if inspect.isclass(function):
        try:
            function = function()
        except RAISED as error:
            raise ValueError(f"{path}: {name}() raised {type(error).__name__}: {error}") from error
    function = adapted(function, path)
    if not callable(function):
        raise ValueError(f"{path}: {name} is not callable, it is {type(function).__name__}")
    return function


def load_module(name: str, path: str) -> Any:
    """The module of this name, or of a file.py, which is executed. ValueError begins with `path`, its import path."""
    if name.endswith(".py"):
        return _load_file(name, path)
    try:
        return importlib.import_module(name)
    except RAISED as error:
        raise ValueError(f"{path}: importing {name} failed: {type(error).__name__}: {error}") from error


def _load_file(name: str, path: str) -> Any:
    try:
        file = Path(name).expanduser()
        there = file.is_file()
    except (OSError, RuntimeError) as error:  # too long a name; an unknown user's home folder
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not there:
        raise ValueError(f"{path}: no such file (looked in {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    sys.path.insert(0, str(file.resolve().parent))  # lets it import files in its folder, as when it is run
    try:
        spec.loader.exec_module(module)
    except RAISED as error:
        raise ValueError(f"{path}: running the file failed: {type(error).__name__}: {error}") from error
    return module


def recognise(function: Callable[..., Any], signature: str, path: str) -> str:
    """The signature's name, from the configuration or the parameter names. ValueError names the parameters."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: its parameters cannot be read ({error}); wrap it in a Python function") from error
    if signature != "auto":
        return signature
    for known, forms in SIGNATURES.items():
        if any(set(wanted) <= set(names) for wanted in forms):
            return known
    told = [f"{known}: {' or '.join(', '.join(form) for form in forms)}" for known, forms in SIGNATURES.items()]
    raise ValueError(
        f"{path}: parameters ({', '.join(names)}) fit no known signature ({'; '.join(told)}); set reward.*.signature"
    )


def _data_source(item: RewardItem) -> str:
    source: str = item.extra.get("data_source", item.domain)
    return source


def _extra_info(item: RewardItem) -> Any:
    return item.extra.get("extra_info") or item.extra


def _verl_score(result: Any) -> Score:
    """The score from verl's number or dict; the dict's other numbers are metrics."""
    if not isinstance(result, dict):
        return as_score(result)
    value = _number(result.get("score"), "the dict's score")
    rest = {k: float(v) for k, v in result.items() if k != "score" and isinstance(v, bool | int | float)}
    return Score(value, value, metrics=rest)


def as_score(value: Any) -> Score:
    """A function's result as a Score. TypeError if it is neither a Score nor a number."""
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
    if count == 1 and isinstance(values, bool | int | float):  # from a tensor without dimensions
        values = [values]
    if not isinstance(values, list | tuple):
        raise TypeError(f"the function returned {type(value).__name__} instead of a list of {count}")
    if len(values) != count:
        raise ValueError(f"the function returned {len(values)} results for {count} responses")
    return list(values)


def _spread(value: Any, count: int) -> list[Any]:
    """A value per response; a single number applies to all responses of the call."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return _list(value, count) if isinstance(value, list | tuple) else [value] * count


def _message(role: str, text: str) -> Any:
    return [{"role": role, "content": text}]
