"""Environments of verifiers (https://github.com/PrimeIntellect-ai/verifiers), versions 0.1.14 to 0.3.

Such an environment runs its rollout itself and requests responses from a model. Here the model is `Asked`: the request
is the observation, and the response the action. So the environment's own code determines messages, tools, limits and
the end, and its rubric scores the whole episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import random
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall

from hpcrl.data.env_sources import HALF
from hpcrl.envs.spec import VerifiersOptions
from hpcrl.envs.tool_formats.deriving import derive
from hpcrl.envs.tool_formats.reading import Parsed, ToolFormat
from hpcrl.envs.tool_formats.table import FORMATS


class VerifiersError(RuntimeError):
    """The environment failed, or does something that an episode cannot represent."""


class ModelRequest(NamedTuple):
    """The environment's request for a response to these messages, with these tools (both in OpenAI form)."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


class Asked(Client):  # type: ignore[misc]
    """A verifiers client that waits for the response from hpcrl."""

    def __init__(self) -> None:
        super().__init__(None)
        self.requests: asyncio.Queue[ModelRequest] = asyncio.Queue()
        self.responses: asyncio.Queue[ResponseMessage] = asyncio.Queue()

    def setup_client(self, config: Any) -> None:
        raise AssertionError("there is nothing to connect to")

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        about = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": about}

    async def to_native_prompt(self, messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return [_message(message) for message in messages], {}

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> ResponseMessage:
        self.requests.put_nowait(ModelRequest(prompt, tools or []))
        return await self.responses.get()

    async def raise_from_native_response(self, response: Any) -> None:
        pass

    async def from_native_response(self, response: ResponseMessage) -> Response:
        return Response(id="hpcrl", created=int(time.time()), model="hpcrl", message=response)

    async def close(self) -> None:
        pass


class Verifiers:
    """An episode is a rollout of the environment. Its last turn gets the reward of the whole rollout, and the rubric
    functions' values as metrics; success is a reward of at least the environment's pass_threshold."""

    runs_in = "task"

    def __init__(
        self,
        options: VerifiersOptions,
        chat_template: str = "",
        answer: str | None = None,
        messages: Sequence[dict[str, Any]] = (),
        info: dict[str, Any] | None = None,
    ):
        """ValueError begins with the wrong option."""
        self._env = environment(options)
        self._options, self._template = options, chat_template
        self._messages, self._task = list(messages), {"answer": answer or "", "info": info or {}}
        self._rollout: asyncio.Task[Any] | None = None
        if self._env.tool_defs:
            self._format()
            self.special_tokens = True  # some tool formats mark calls with special tokens

    async def reset(self, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Start a rollout; returns its first request. VerifiersError if there is none."""
        await self.close()
        self._model, self._shown, self._turn = Asked(), [], 0
        self._rollout = asyncio.create_task(self._env.run_rollout(self._input(seed), self._model, "hpcrl", {}))
        request = await self._next()
        if request is None:
            raise VerifiersError(f"the rollout ended before the first turn: {self._result()['stop_condition']}")
        self._shown, self._tools = request.messages, request.tools
        return request.messages, {"tools": request.tools} if request.tools else {}

    async def step(self, action: str) -> tuple[list[dict[str, Any]], float, bool, bool, dict[str, Any]]:
        """The messages between two requests, or the end. VerifiersError if the environment failed."""
        if self._rollout is None or self._rollout.done():
            raise RuntimeError("step() needs a running episode: call reset() first")
        self._turn += 1
        self._model.responses.put_nowait(self._response(action))
        request = await self._next()
        if request is None:
            return self._end()
        before, self._shown = self._shown, request.messages
        messages = request.messages[len(before) + 1 :]
        if request.messages[: len(before)] != before or not messages:
            raise VerifiersError("the environment rewrites the dialogue, but an episode has every token only once")
        return messages, 0.0, False, False, {}

    async def close(self) -> None:
        """End the rollout, including the environment's own cleanup."""
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await rollout

    async def _next(self) -> ModelRequest | None:
        """The next request; None at the end of the rollout."""
        assert self._rollout is not None
        asked = asyncio.ensure_future(self._model.requests.get())
        try:
            await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            asked.cancel()

    def _result(self) -> dict[str, Any]:
        """The rollout's outcome. Raises the rollout's exception, or VerifiersError for an error of the environment."""
        assert self._rollout is not None
        output: dict[str, Any] = self._rollout.result()
        if output["error"]:
            raise VerifiersError(f"the environment failed: {output['error']!r}"[:2000])
        return output

    def _end(self) -> tuple[list[dict[str, Any]], float, bool, bool, dict[str, Any]]:
        output = self._result()
        said = [_message(message) for message in output["completion"] or []]
        last = max((number for number, message in enumerate(said) if message["role"] == "assistant"), default=-1)
        reward, cut = float(output["reward"]), output["stop_condition"] == "timeout_reached"
        metrics = {str(name): float(value) for name, value in (output["metrics"] or {}).items()}
        metrics["success"] = float(reward >= self._env.pass_threshold)
        return said[last + 1 :], reward, not cut, cut, {"metrics": metrics}

    def _input(self, seed: int) -> dict[str, Any]:
        """The row with which the rollout starts."""
        if self._options.task == "dataset":
            rows = self._env.get_eval_dataset() if seed >= HALF else self._env.get_dataset()
            return dict(rows[random.Random(seed).randrange(len(rows))])
        messages, system = self._messages, self._env.system_prompt
        if system and messages and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return {"prompt": messages, "example_id": seed, **self._task}

    def _format(self) -> ToolFormat:
        """The format of the model's calls. ValueError if no format reads its chat template's calls."""
        return FORMATS[derive(self._template, self._options.format)]

    def _response(self, action: str) -> ResponseMessage:
        """The model's text; if the environment has tools, the text after the reasoning, and the calls. The problem of
        an invalid call replaces its arguments, which then are not JSON: the environment reports this to the model."""
        text = action.encode(errors="replace").decode()  # pydantic rejects lone surrogates
        parsed = self._format().parse(text, self._tools) if self._tools else Parsed(text)
        calls = []
        for number, call in enumerate(parsed.calls):
            arguments = call.problem or json.dumps(dict(call.arguments))
            name = f"call{self._turn % 1000:03d}{number % 100:02d}"
            calls.append(ToolCall(id=name, name=call.name or "unknown", arguments=arguments))
        reason = "tool_calls" if calls else "stop"
        return ResponseMessage(
            content=parsed.content, tool_calls=calls or None, finish_reason=reason, is_truncated=False
        )


def environment(options: VerifiersOptions) -> Any:
    """The environment of these options, one for all episodes of a process. ValueError begins with the wrong option."""
    return _loaded(options.id, options.entry_point, json.dumps(options.kwargs, sort_keys=True))


@functools.cache
def _loaded(name: str, entry_point: str, kwargs: str) -> Any:
    at, path, given = "id" if name else "entry_point", name or entry_point, json.loads(kwargs)
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if name:
            made = vf.load_environment(name, **given)
        else:
            module, _, function = entry_point.partition(":")
            made = getattr(importlib.import_module(module), function)(**given)
    except Exception as error:  # user code may raise any exception
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"{at}: {path!r} gives no environment with the arguments {given}: {text}") from error
    finally:
        for number, handler in before.items() if main else ():
            signal.signal(number, handler)  # an environment replaces the process's signal handlers
    if not isinstance(made, vf.Environment):
        raise ValueError(f"{at}: {path!r} gives no environment of verifiers but {type(made).__name__}")
    if made.requires_group_rollouts:
        raise ValueError(f"{at}: the rubric of {path!r} scores groups; use it as reward function with add_reward")
    return made


def probe(options: VerifiersOptions, own_code: bool) -> None:
    """Create the environment, only in env ranks. ValueError begins with the wrong option or reports missing data."""
    if own_code:
        made = environment(options)
        if options.task == "dataset" and not len(made.get_dataset()):
            raise ValueError("task: the environment has no data set; use row")


def _message(message: Any) -> dict[str, Any]:
    """A verifiers message in hpcrl's form. VerifiersError if it has more than text."""
    given = message if isinstance(message, dict) else message.model_dump()
    content = given.get("content")
    parts = [{"type": "text", "text": content or ""}] if isinstance(content, str | None) else content
    if other := [part.get("type") for part in parts if part.get("type") != "text"]:
        raise VerifiersError(f"a message of the environment has a part of type {other[0]!r}; only text is shown")
    told = {"role": given["role"], "content": "".join(part["text"] for part in parts)}
    return told | ({"tool_call_id": given["tool_call_id"]} if given["role"] == "tool" else {})
