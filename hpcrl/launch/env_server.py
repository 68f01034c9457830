"""A server of environments, for env ranks elsewhere (env.NAME.name=remote).

python -m hpcrl.launch.env_server [--host HOST] [--port PORT] [--token-env NAME] [--idle-s S] [--max-sessions N]
    env.NAME.KEY=VALUE ...

The server hosts every `env` section of the configuration, prints its address, and runs each session in the request's
thread; an environment's coroutines run in the server's one event loop. Requests are JSON objects of the types below,
posted to /reset, /step, /close and /sections.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import http.server
import inspect
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hpcrl.config import Config, load
from hpcrl.config.reading import ConfigError
from hpcrl.envs.adapters.remote import MAX_BYTES, data_url, with_file
from hpcrl.envs.environment import UNREAD_KEYS, Env, begin, checked_reset, checked_step
from hpcrl.envs.factory import check_env, make_env
from hpcrl.rewards.serving.guarded import RAISED, describe
from hpcrl.system.exit_codes import ExitCode

MAX_SESSIONS = 4096
READ_S = 30.0
"""Timeout for the next bytes of a request."""
DISCARD_S, DISCARDED_BYTES = 0.2, 1 << 16
"""When a body is discarded: timeout for the next bytes, and bytes per read."""
UNREAD = (401, 413)
"""Statuses of requests whose body is not read."""


class EnvReset(msgspec.Struct, forbid_unknown_fields=True):
    """Starts a session. `row` has the columns of the prompt's row, with prompt, answer and messages; `max_turns` is the
    run's limit, None if the client did not send one."""

    section: str
    seed: int
    row: dict[str, Any]
    chat_template: str = ""
    max_turns: int | None = None


class EnvStep(msgspec.Struct, forbid_unknown_fields=True):
    """Takes a step. `number` is its index in the session, from 0; a repeated request gets the same answer."""

    session: str
    number: int
    action: str


class EnvClose(msgspec.Struct, forbid_unknown_fields=True):
    """Ends a session; it is no error if the session has already ended."""

    session: str


class EnvSections(msgspec.Struct, forbid_unknown_fields=True):
    """Asks for the names of the sections."""


class EnvRefused(Exception):
    """An HTTP error for the sender of a request."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


@dataclass(eq=False)
class _Session:
    env: Env
    returned: Callable[[Any], Any]
    used: float = 0.0
    steps: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        if hasattr(self.env, "close"):
            with contextlib.suppress(*RAISED):
                self.returned(self.env.close())


class EnvServer(http.server.ThreadingHTTPServer):
    """Listens once constructed; serve_forever() answers.

    Args:
        idle_s: a session without requests for this long is closed.
        max_sessions: maximum number of open sessions.

    Raises:
        ValueError: a section names no environment that can be made.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(
        self,
        config: Config,
        at: tuple[str, int],
        token: str = "",
        idle_s: float = 600.0,
        max_sessions: int = MAX_SESSIONS,
    ):
        for section, env in config.envs.items():
            check_env(env, section)
        self._envs, self._token, self._idle_s, self._max_sessions = config.envs, token, idle_s, max_sessions
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()
        self._tasks = asyncio.new_event_loop()
        threading.Thread(target=self._tasks.run_forever, name="coroutines", daemon=True).start()
        self.address_family = socket.AF_INET6 if ":" in at[0] else socket.AF_INET
        super().__init__(at, _Handler)

    def service_actions(self) -> None:
        """Close idle sessions; called several times a second."""
        now = time.monotonic()
        with self._lock:
            left = [name for name, one in self._sessions.items() if now - one.used > self._idle_s]
            over = [self._sessions.pop(name) for name in left if not self._sessions[name].lock.locked()]
        for session in over:
            threading.Thread(target=session.close, name="close", daemon=True).start()

    def server_close(self) -> None:
        super().server_close()
        self._tasks.call_soon_threadsafe(self._tasks.stop)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections: the client handles them."""

    def admit(self, path: str, token: str, length: str) -> int:
        """Length of a request's body, from its Content-Length; EnvRefused, with a status, if the body is not read."""
        if self._token and not hmac.compare_digest(token.encode(), f"Bearer {self._token}".encode()):
            raise EnvRefused(401, "the token is wrong")
        if path not in _ANSWERS:
            raise EnvRefused(404, f"nothing is served at {path[:60]!r}")
        if not length.isdecimal() or int(length) > MAX_BYTES:
            raise EnvRefused(413, f"a request has a Content-Length of at most {MAX_BYTES} bytes")
        return int(length)

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """The answer to a request; EnvRefused, with a status, if it cannot be answered."""
        kind, function = _ANSWERS[path]
        try:
            asked = msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EnvRefused(400, f"the request is not as expected: {error}") from error
        given: dict[str, Any] = function(self, asked)
        return given

    def _reset(self, asked: EnvReset) -> dict[str, Any]:
        if asked.section not in self._envs:
            raise EnvRefused(404, f"there is no section {asked.section[:60]!r}; there are {', '.join(self._envs)}")
        if len(self._sessions) >= self._max_sessions:
            raise EnvRefused(503, f"the server has {self._max_sessions} sessions, as many as --max-sessions allows")
        named = {name: asked.row.pop(name, None) for name in ("prompt", "answer", "messages")}
        config = self._envs[asked.section]
        config = config.model_copy(update={"max_turns": asked.max_turns or config.max_turns})
        env = make_env(config, named | {"extra": asked.row}, asked.chat_template)
        session = _Session(env, self._returned)
        try:
            observation, info = checked_reset(self._returned(begin(env, asked.seed)))
        except BaseException:
            session.close()
            raise
        session.used, name = time.monotonic(), secrets.token_hex(16)
        with self._lock:
            self._sessions[name] = session
        special = bool(getattr(env, "special_tokens", False))
        return {
            "session": name,
            "observation": _with_files(observation),
            "info": _told(info),
            "special_tokens": special,
        }

    def _step(self, asked: EnvStep) -> dict[str, Any]:
        with self._lock:
            session = self._sessions.get(asked.session)
        if session is None:
            raise EnvRefused(410, "there is no such session: it was closed, idle too long, or of an earlier server")
        with session.lock:
            session.used = time.monotonic()
            if asked.number == session.steps - 1:
                return session.last
            if asked.number != session.steps:
                raise EnvRefused(409, f"step {asked.number} of the session after {session.steps} steps")
            try:
                played = checked_step(self._returned(session.env.step(asked.action)))
                observation, reward, terminated, truncated, info = played
            except BaseException:  # a repeated request must not run the step again
                self._close(EnvClose(asked.session))
                raise
            session.used, session.steps = time.monotonic(), session.steps + 1
            ends = {"terminated": bool(terminated), "truncated": bool(truncated)}
            session.last = {
                "observation": _with_files(observation),
                "reward": float(reward),
                **ends,
                "info": _told(info),
            }
            return session.last

    def _returned(self, value: Any) -> Any:
        """The value, or the result of a coroutine."""
        return asyncio.run_coroutine_threadsafe(value, self._tasks).result() if inspect.iscoroutine(value) else value

    def _close(self, asked: EnvClose) -> dict[str, Any]:
        with self._lock:
            session = self._sessions.pop(asked.session, None)
        if session is not None:
            session.close()
        return {}

    def _list(self, asked: EnvSections) -> dict[str, Any]:
        return {"sections": list(self._envs)}


_ANSWERS: dict[str, tuple[type[msgspec.Struct], Any]] = {
    "/reset": (EnvReset, EnvServer._reset),
    "/step": (EnvStep, EnvServer._step),
    "/close": (EnvClose, EnvServer._close),
    "/sections": (EnvSections, EnvServer._list),
}


class _Handler(http.server.BaseHTTPRequestHandler):
    server_version, sys_version = "hpcrl", ""  # discloses no versions
    timeout = READ_S
    server: EnvServer

    def do_POST(self) -> None:
        try:
            asked = (self.headers.get(name, "") for name in ("Authorization", "Content-Length"))
            body = self.rfile.read(self.server.admit(self.path, *asked))
            status, content = 200, self.server.answer(self.path, body)
            data = json.dumps(content, default=data_url).encode()
        except EnvRefused as error:
            status, content = error.status, {"error": str(error)}
        except RAISED as error:  # an environment's error ends only its own session
            status, content = 500, {"error": describe(error)}
        if status != 200:
            data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        if status in UNREAD:
            self._discard()

    def _discard(self) -> None:
        """Read and discard the body, up to a limit: a client that cannot send all of it would not read the answer."""
        self.close_connection, end = True, time.monotonic() + READ_S
        self.connection.settimeout(DISCARD_S)
        with contextlib.suppress(OSError):
            for _ in range(2 * MAX_BYTES // DISCARDED_BYTES):
                if time.monotonic() > end or not self.rfile.read1(DISCARDED_BYTES):
                    return

    def log_message(self, *args: object) -> None:
        pass


def _with_files(observation: Any) -> Any:
    """The observation with the content of images that it has by path, which the client cannot read."""
    if not isinstance(observation, list):
        return observation
    return [
        {**message, "images": [with_file(image) for image in message["images"]]} if message.get("images") else message
        for message in observation
    ]


def _told(info: dict[str, Any]) -> dict[str, Any]:
    """The entries of `info` that an env rank reads, as plain Python types."""
    metrics = {str(name): float(value) for name, value in info.get("metrics", {}).items()}
    ends = {key: bool(info[key]) for key in ("terminated", "truncated") if key in info}
    return {key: info[key] for key in ("tools", UNREAD_KEYS) if info.get(key)} | ends | {"metrics": metrics}


def main(argv: Sequence[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m hpcrl.launch.env_server", description="A server of environments.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=0, help="port; 0: a free one")
    parser.add_argument("--token-env", default="", help="environment variable with the token that clients need")
    parser.add_argument("--idle-s", type=float, default=600.0, help="close a session after this time without requests")
    parser.add_argument("--max-sessions", type=int, default=MAX_SESSIONS, help="maximum number of open sessions")
    parser.add_argument("arguments", nargs="*", metavar="KEY=VALUE", help="the configuration; only env is read")
    given = parser.parse_args(argv)
    token = os.environ.get(given.token_env, "") if given.token_env else ""
    if not token and (given.token_env or given.host not in ("127.0.0.1", "::1", "localhost")):
        print("a server needs a token unless it listens on 127.0.0.1: --token-env NAME of a variable", file=sys.stderr)
        return ExitCode.BAD_INPUT
    try:
        config = load(given.arguments)
        if not config.envs:
            raise ValueError("no environment is configured; give env.default.name")
        server = EnvServer(config, (given.host, given.port), token, given.idle_s, given.max_sessions)
    except OverflowError:
        print(f"--port {given.port}: a port is a number from 0 to 65535", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except (ConfigError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return ExitCode.BAD_INPUT
    host = f"[{given.host}]" if ":" in given.host else given.host
    print(f"environments {', '.join(config.envs)} at http://{host}:{server.server_address[1]}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever(0.2)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
