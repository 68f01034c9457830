"""An environment on another machine: the HTTP client of python -m hpcrl.launch.env_server.

A request is repeated after a broken connection until options.retry_s have passed, which is safe: the server executes a
step once, however often it is requested, and closes idle sessions. Redirects and proxies are not followed, since they
would forward the token. All methods are coroutines, so all episodes of an env rank wait in one event loop
instead of a thread each.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import itertools
import json
import os
import ssl
import time
from pathlib import Path
from typing import Any

import httpx2

from hpcrl.envs.spec import RemoteOptions

PAUSE_S = 0.2
MAX_BYTES = 64 << 20
"""Maximum size of a request, and of an answer."""


class RemoteEnvError(RuntimeError):
    """The environment or its server failed, or the server is gone."""


class RemoteEnv:
    """One episode of the environment in a section of the server, which gets all columns of the row."""

    runs_in = "task"
    max_turns: int | None = None

    def __init__(self, options: RemoteOptions, /, chat_template: str = "", **columns: Any):
        self._options, self._template, self._columns = options, chat_template, columns
        self._session = ""
        self._numbers = itertools.count()
        self.special_tokens = False  # from the server's environment after reset()

    async def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Start an episode. RemoteEnvError as in step()."""
        await self.close()
        row = {**self._columns, **({"images": _as_files(images)} if (images := self._columns.get("images")) else {})}
        asked = {"seed": seed, "row": row, "chat_template": self._template, "max_turns": self.max_turns}
        given = await ask(self._options, "reset", asked | {"section": self._options.section})
        self._session, self._numbers = given["session"], itertools.count()
        self.special_tokens = bool(given.get("special_tokens"))
        return _own(given["observation"]), given["info"]

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute a step. RemoteEnvError if the environment raised, or the server is gone or has lost the episode."""
        asked = {"session": self._session, "number": next(self._numbers), "action": action}
        given = await ask(self._options, "step", asked)
        return _own(given["observation"]), given["reward"], given["terminated"], given["truncated"], given["info"]

    async def close(self) -> None:
        """End the session, if there is one. If the server does not answer, it closes the session later by itself."""
        session, self._session = self._session, ""
        if session:
            await ask(self._options, "close", {"session": session})


def _as_files(images: Any) -> Any:
    """A row's images for another machine: files instead of paths on this one."""
    if not isinstance(images, list):
        return images
    return [with_file(image) for image in images]


def _own(observation: Any) -> Any:
    """The observation. TypeError if an image is a path, which would name a file of this machine."""
    for message in observation if isinstance(observation, list) else ():
        for image in (message.get("images") if isinstance(message, dict) else None) or ():
            if isinstance(image, str) and not image.startswith("data:"):
                raise TypeError(f"the server sent the path of an image, {image[:80]!r}, instead of a data URL")
    return observation


def with_file(image: Any) -> Any:
    """An image given by its path as its content; other values are returned unchanged. OSError if there is no file."""
    return Path(image).read_bytes() if isinstance(image, str) and not image.startswith("data:") else image


async def ask(options: RemoteOptions, what: str, content: dict[str, Any]) -> dict[str, Any]:
    """The server's answer. RemoteEnvError if there is none."""
    try:
        token = token_of(options)
    except ValueError as error:
        raise RemoteEnvError(f"{options.url}: {error}") from None
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    url, body = f"{options.url.rstrip('/')}/{what}", json.dumps(content, default=data_url).encode()
    end = time.monotonic() + options.retry_s
    async with httpx2.AsyncClient(verify=_tls(), trust_env=False, timeout=options.timeout_s, headers=headers) as client:
        while True:
            try:
                async with client.stream("POST", url, content=body) as answer:
                    status, told = answer.status_code, await _read(answer)
                break
            except httpx2.TimeoutException as error:
                raise RemoteEnvError(f"{options.url}: no answer to {what} within {options.timeout_s:g} s") from error
            except (OSError, httpx2.TransportError) as error:
                if time.monotonic() > end:
                    raise RemoteEnvError(f"{options.url}: the environment server does not answer: {error}") from error
                await asyncio.sleep(PAUSE_S)
    if status != 200:
        raise RemoteEnvError(f"{options.url}: {_told(status, told)}")
    try:
        given: dict[str, Any] = json.loads(told)
    except ValueError as error:
        raise RemoteEnvError(f"{options.url}: the answer to {what} is not JSON: {error}") from error
    return given


def token_of(options: RemoteOptions) -> str:
    """The server's token, empty without token_env. ValueError, without the token's text, if it cannot be sent."""
    if not options.token_env:
        return ""
    token = os.environ.get(options.token_env, "")
    if not token:
        raise ValueError(f"token_env: the environment variable {options.token_env} is not set where the env ranks run")
    if not (token.isascii() and token.isprintable()):
        what = "characters that are not allowed in an HTTP header, such as a line break"
        raise ValueError(f"token_env: the token in {options.token_env} has {what}")
    return token


def data_url(value: Any) -> str:
    """The bytes of an image as JSON can hold them. TypeError for other values, as json.dumps() expects."""
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} is no JSON type")
    return f"data:application/octet-stream;base64,{base64.b64encode(value).decode()}"


async def _read(answer: httpx2.Response) -> bytes:
    """The body, up to the limit."""
    read = bytearray()
    async for part in answer.aiter_raw():
        read += part
        if len(read) > MAX_BYTES:
            break
    return bytes(read[:MAX_BYTES])


@functools.cache
def _tls() -> ssl.SSLContext:
    """A TLS context with the machine's certificates, cached since creating it takes longer than a request."""
    return ssl.create_default_context()


def probe(options: RemoteOptions, own_code: bool) -> None:
    """ValueError if the server does not answer or hosts no such section; only env ranks check this."""
    if not own_code:
        return
    token_of(options)
    try:
        sections = asyncio.run(ask(options, "sections", {}))["sections"]
    except RemoteEnvError as error:
        raise ValueError(f"url: {error}") from error
    if options.section not in sections:
        raise ValueError(f"section: the server has no {options.section!r}; it has {', '.join(sections)}")


def _told(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"
