"""A user's function as a tool."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import itertools
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from queue import Empty, Queue
from typing import Any

from hpcrl.envs.tools.tool import Result

MAX_ITEMS = 10_000
"""Maximum items of a generator."""


class FunctionTool:
    """Calls the function in its own thread, which is abandoned if it does not return in time. A coroutine runs in its
    own event loop, and is cancelled. A returned text is shown unchanged, another value as JSON, and a generator's items
    as a list. A value without a text form is an error."""

    def __init__(self, path: str):
        """ValueError if `path` does not name a function with a description."""
        self._function, self.schema = _imported(path)

    def begin(self, seed: int) -> None:
        """A function has no state of an episode."""

    def call(self, arguments: dict[str, Any], timeout_s: float) -> Result:
        ended: Queue[Result] = Queue()

        def run() -> None:
            try:
                ended.put(Result(_text(_value(self._function(**arguments), timeout_s))))
            except BaseException as error:  # user code may call sys.exit
                ended.put(Result(_problem(error), error=True))

        threading.Thread(target=run, name="tool", daemon=True).start()
        try:
            return ended.get(timeout=timeout_s)
        except Empty:
            return Result(f"the call did not return within {timeout_s:g} s", error=True)


def _value(returned: Any, timeout_s: float) -> Any:
    """A call's result: for a coroutine its result, for a generator its items."""
    if inspect.isawaitable(returned) or isinstance(returned, AsyncIterator):
        return asyncio.run(_awaited(returned, timeout_s))
    return _items(itertools.islice(returned, MAX_ITEMS + 1)) if isinstance(returned, Iterator) else returned


async def _awaited(returned: Any, timeout_s: float) -> Any:
    async with asyncio.timeout(timeout_s):
        if isinstance(returned, AsyncIterator):
            items: list[Any] = []
            async for item in returned:
                items.append(item)
                if len(items) > MAX_ITEMS:
                    break
            return _items(items)
        found = await returned
    return _value(found, timeout_s) if isinstance(found, Iterator) else found


def _items(found: Iterable[Any]) -> list[Any]:
    items = list(found)
    if len(items) > MAX_ITEMS:
        raise ValueError(f"the tool yields more than {MAX_ITEMS} items")
    return items


def _text(value: Any) -> str:
    """The value as the model sees it. TypeError if it has no text."""
    return value if isinstance(value, str) else json.dumps(value, default=_shown, ensure_ascii=False)


def _shown(value: Any) -> Any:
    """Converts a value that is not a JSON type: from numpy and torch by tolist(), other values to text."""
    if callable(listed := getattr(value, "tolist", None)):
        return listed()
    kind: Any = type(value)
    plain = kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__
    if plain or callable(value) or isinstance(value, Awaitable | Iterator | AsyncIterator):
        raise TypeError(f"the tool returned a value of the type {type(value).__name__}, which has no text")
    return str(value)


def _problem(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the error's own code may raise
        return type(error).__name__


@functools.cache
def _imported(path: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    from transformers.utils.chat_template_utils import get_json_schema  # takes a second

    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        if inspect.isclass(function):
            raise TypeError("it is a class")
        found: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # a user's module may raise any exception
        raise ValueError(
            f"tools: {path!r} is not a function with a description: {type(error).__name__}: {error}"
        ) from error
    return function, found
