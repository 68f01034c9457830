"""A function of the user as a tool."""

from __future__ import annotations

import functools
import importlib
import json
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from hpcrl.envs.tools.base import Result


class FunctionTool:
    """Calls the function in a thread of its own, which is abandoned if it does not return in time. What it returns is
    shown as JSON, a text as it is."""

    def __init__(self, path: str):
        """ValueError if the path leads to no function that can be described."""
        self._function, self.schema = _imported(path)

    def begin(self, seed: int) -> None:
        """A function is not of an episode."""

    def call(self, arguments: dict[str, Any], timeout_s: float) -> Result:
        ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                ended.put((self._function(**arguments), None))
            except BaseException as error:  # user code may call sys.exit
                ended.put((None, error))

        threading.Thread(target=run, name="tool", daemon=True).start()
        try:
            value, error = ended.get(timeout=timeout_s)
        except Empty:
            return Result(f"the call did not return within {timeout_s:g} s", error=True)
        if error is not None:
            return Result(f"{type(error).__name__}: {error}", error=True)
        return Result(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))


@functools.cache
def _imported(path: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    from transformers.utils.chat_template_utils import get_json_schema  # imports torch

    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        found: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # a user's module may raise any exception
        raise ValueError(
            f"tools: {path!r} is no function with a description: {type(error).__name__}: {error}"
        ) from error
    return function, found
