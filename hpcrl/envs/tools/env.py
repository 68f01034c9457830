"""Tools: the model calls functions until a turn without a call, which is its final answer."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import jsonschema

from hpcrl.data.messages import WRITTEN_MARK
from hpcrl.envs.environment import shortened
from hpcrl.envs.tool_formats.deriving import derive
from hpcrl.envs.tool_formats.reading import ToolCall, schemas_of
from hpcrl.envs.tool_formats.table import FORMATS
from hpcrl.envs.tools.builtin import BUILTIN, GuessTool
from hpcrl.envs.tools.function import FunctionTool
from hpcrl.envs.tools.spec import ToolOptions
from hpcrl.envs.tools.tool import Result, Tool

ID_CHARS = 9
"""Length of a call's id, as Mistral's template requires."""


class ToolEnv:
    """Every call of a turn is answered by a message of the role tool, in order, with its result or its problem. Calls
    within the thinking are ignored.

    Metrics of the episode so far: tool_calls, how many of these were invalid_calls (no JSON, an unknown tool, wrong
    arguments, beyond max_calls) or tool_errors, and success if a tool reports it.
    """

    special_tokens = True  # some formats mark calls with special tokens

    def __init__(
        self,
        options: ToolOptions,
        chat_template: str = "",
        messages: list[dict[str, Any]] | None = None,
        images: list[Any] | None = None,
    ):
        """`images` are the row's, for the tool crop. ValueError begins with the wrong option."""
        self._options, self._messages = options, messages or []
        self._format = FORMATS[derive(chat_template, options.format)]
        made: list[Tool] = [
            BUILTIN[name](options, images or ()) if name in BUILTIN else FunctionTool(name) for name in options.tools
        ]
        self._tools = {tool.schema["function"]["name"]: tool for tool in made}
        if len(self._tools) < len(made):
            raise ValueError(f"tools: two of {', '.join(options.tools)} have the same name")
        self._schemas = schemas_of(tool.schema for tool in made)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """The row's prompt inserted into options.prompt, and the tools."""
        for tool in self._tools.values():
            tool.begin(seed)
        self._counts = Counter(tool_calls=0, invalid_calls=0, tool_errors=0)
        self._turn = 0
        # With the tool guess, an episode that never calls it counts as a failure in the share of successes.
        self._success = False if any(isinstance(tool, GuessTool) for tool in self._tools.values()) else None
        asked = self._messages[-1]["content"] if self._messages else ""
        text = "" if self._options.prompt == "{prompt}" else self._options.prompt.replace("{prompt}", asked)
        return text, {"tools": [tool.schema for tool in self._tools.values()]}

    def step(self, action: str) -> tuple[list[dict[str, Any]], float, bool, bool, dict[str, Any]]:
        """Execute the calls of a turn; a turn without calls ends the episode."""
        calls = self._format.read(action, self._schemas).calls
        self._turn += 1
        before, reward, ended, messages = self._counts["invalid_calls"], 0.0, not calls, []
        told = calls[: self._options.max_calls + 1]  # one answer for all excess calls
        self._counts.update(tool_calls=len(calls) - len(told), invalid_calls=len(calls) - len(told))
        for number, call in enumerate(told):
            result = self._answer(call, number)
            reward += result.reward
            ended = ended or result.ended
            self._success = self._success if result.success is None else result.success
            message = {
                "role": "tool",
                "name": call.name if call.name in self._tools else "unknown",
                "tool_call_id": self._id(call, number),
                "content": self._cut(result.text),
            }
            messages.append(_with_images(message, result.images) if result.images else message)
            if ended:
                break
        if self._counts["invalid_calls"] > before:
            reward += self._options.invalid_reward
        metrics = {name: float(count) for name, count in self._counts.items()}
        if self._success is not None:
            metrics["success"] = float(self._success)
        return messages, reward, ended, False, {"metrics": metrics}

    def expert(self, rng: random.Random, noise: float) -> str:
        """A call of the tool guess, the only tool with an expert (TOOLS.expert_obstacle)."""
        (tool,) = self._tools.values()
        assert isinstance(tool, GuessTool), "others are refused before the start"
        return self._format.written_call(tool.schema["function"]["name"], tool.advised(rng, noise))

    def _answer(self, call: ToolCall, number: int) -> Result:
        self._counts["tool_calls"] += 1
        if problem := self._problem(call, number):
            self._counts["invalid_calls"] += 1
            return Result(f"Error: {problem}")
        try:
            result = self._tools[call.name].call(dict(call.arguments), self._options.tool_timeout_s)
        except Exception as error:  # a tool's exception is part of the episode
            result = Result(f"{type(error).__name__}: {error}", error=True)
        self._counts["tool_errors"] += result.error
        return Result(f"Error: {result.text}") if result.error else result

    def _problem(self, call: ToolCall, number: int) -> str:
        """Why a call cannot be executed, as shown to the model; empty if it can."""
        if number >= self._options.max_calls:
            return f"only {self._options.max_calls} calls of a turn are carried out"
        if call.problem:
            return call.problem
        if call.name not in self._tools:
            return f"there is no tool {call.name[:60]!r}; there are {', '.join(self._tools)}"
        wanted = self._tools[call.name].schema["function"]["parameters"]
        try:
            jsonschema.validate(call.arguments, wanted)
        except jsonschema.ValidationError as error:
            at = ".".join(map(str, error.path))
            return f"wrong arguments of {call.name}: {f'{at}: ' if at else ''}{error.message[:300]}"
        except RecursionError:  # from jsonschema's own messages, which show the value
            return f"wrong arguments of {call.name}: they are nested too deeply"
        if unknown := [name for name in call.arguments if name not in wanted["properties"]]:
            return f"wrong arguments of {call.name}: there is no {unknown[0][:60]!r}"
        return ""

    def _id(self, call: ToolCall, number: int) -> str:
        own = call.id if len(call.id) == ID_CHARS and call.id.isascii() and call.id.isalnum() else ""
        return own or f"call{self._turn % 1000:03d}{number:02d}"

    def _cut(self, text: str) -> str:
        text = text.encode(errors="replace").decode()  # a lone surrogate cannot be sent
        return shortened(text, self._options.max_result_chars)


def _with_images(message: dict[str, Any], images: tuple[Any, ...]) -> dict[str, Any]:
    """The message with images, which precede its text; `<image>` in the text would count as their place."""
    return {**message, "content": message["content"].replace(WRITTEN_MARK, ""), "images": list(images)}


def probe(options: ToolOptions, own_code: bool) -> None:
    """ValueError if a tool cannot be created. own_code: import functions and start the sandbox."""
    if own_code:
        ToolEnv(options)
        if "python" in options.tools:
            try:
                BUILTIN["python"](options, ()).call({"code": "print(1)"}, options.tool_timeout_s)
            except ValueError as error:
                raise ValueError(f"min_level: {error}") from error
