"""An environment behind HTTP: the client of python -m hpcrl.launch.env_server.

A request is repeated after a broken connection until options.retry_s have passed, which is safe: the server plays a
step once, whatever the number of its requests, and closes a session that nobody asks for. Redirects and proxies are
not followed, since the token would go with them.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from hpcrl.envs.specs import RemoteOptions
from hpcrl.rewards.endpoint import NoRedirects

PAUSE_S = 0.2
MOST_BYTES = 64 << 20
"""Longest request, and longest answer."""


class RemoteEnvError(RuntimeError):
    """The environment or its server failed, or the server is gone."""


class RemoteEnv:
    """One episode of the environment of a section of the server. All columns of the row go there."""

    def __init__(self, options: RemoteOptions, /, chat_template: str = "", **columns: Any):
        self._options, self._template, self._columns = options, chat_template, columns
        self._session = ""
        self._numbers = itertools.count()

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """RemoteEnvError as for step()."""
        self.close()
        asked = {"seed": seed, "row": self._columns, "chat_template": self._template}
        given = ask(self._options, "reset", asked | {"section": self._options.section})
        self._session, self._numbers = given["session"], itertools.count()
        return given["observation"], given["info"]

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """RemoteEnvError if the environment raised, the server is gone, or it has lost the episode."""
        given = ask(self._options, "step", {"session": self._session, "number": next(self._numbers), "action": action})
        return given["observation"], given["reward"], given["terminated"], given["truncated"], given["info"]

    def close(self) -> None:
        """End the session, if there is one. A server that does not answer closes it by itself."""
        session, self._session = self._session, ""
        if session:
            ask(self._options, "close", {"session": session})


_OPENER = urllib.request.build_opener(NoRedirects, urllib.request.ProxyHandler({}))


def ask(options: RemoteOptions, what: str, content: dict[str, Any]) -> dict[str, Any]:
    """The server's answer. RemoteEnvError says why there is none."""
    token = os.environ.get(options.token_env, "") if options.token_env else ""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{options.url.rstrip('/')}/{what}", json.dumps(content).encode(), headers)
    end = time.monotonic() + options.retry_s
    while True:
        try:
            with _OPENER.open(request, timeout=options.timeout_s) as answer:
                given: dict[str, Any] = json.loads(answer.read(MOST_BYTES))
                return given
        except urllib.error.HTTPError as error:
            raise RemoteEnvError(f"{options.url}: {_told(error)}") from error
        except TimeoutError as error:
            raise RemoteEnvError(f"{options.url}: no answer to {what} within {options.timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > end:
                raise RemoteEnvError(f"{options.url}: the environment server does not answer: {error}") from error
            time.sleep(PAUSE_S)
        except ValueError as error:
            raise RemoteEnvError(f"{options.url}: the answer to {what} is no JSON: {error}") from error


def probe(options: RemoteOptions, own_code: bool) -> None:
    """ValueError if the server does not answer or hosts no such section; only env ranks ask it."""
    if not own_code:
        return
    try:
        sections = ask(options, "sections", {})["sections"]
    except RemoteEnvError as error:
        raise ValueError(f"url: {error}") from error
    if options.section not in sections:
        raise ValueError(f"section: the server has no {options.section!r}; it has {', '.join(sections)}")


def _told(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(1 << 20))["error"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"status {error.code}"
