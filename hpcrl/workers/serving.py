"""An HTTP server on a rank of the run, for requests of reward workers, on the run's network and with its token.

One thread per connection reads and checks a request, and waits for the answer, which the rank's main loop gives.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import queue
import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hpcrl.rewards.services import LOAD_HEADER

MAX_BYTES = 8 << 20
"""Maximum request size without images; the four texts that a judge gets have at most 4 MiB in ASCII."""
MAX_CONNECTIONS = 2048
READ_S = 30.0
"""Timeout for the next bytes of a request."""
LOOK_S = 0.5
"""Seconds between checks whether the client of an open question is still connected."""


class Question:
    """A checked request, which the rank's main loop answers or refuses once. `gone`: the client has disconnected."""

    def __init__(self, asked: Any):
        self.asked, self.gone = asked, False
        self._result: tuple[int, dict[str, Any]] = 500, {}
        self._done = threading.Event()

    def answer(self, content: dict[str, Any]) -> None:
        self._result = 200, content
        self._done.set()

    def refuse(self, text: str, status: int = 400) -> None:
        self._result = status, {"error": {"message": text}}
        self._done.set()

    def wait(self, client: socket.socket) -> tuple[int, dict[str, Any]] | None:
        """Wait for the answer's (status, content); None if the client disconnects first."""
        while not self._done.wait(LOOK_S):
            if _has_gone(client):
                self.gone = True
                return None
        return self._result


class Service:
    """The HTTP server, which listens from the constructor to close().

    Args:
        paths: Maps each URL path to the type of the JSON object that is posted to it.
        most: Maximum number of open questions. Further questions are refused with status 503.
        wake: Called in another thread when a question arrives.
        max_bytes: Maximum request size.
    """

    def __init__(
        self,
        address: str,
        token: str,
        paths: Mapping[str, type[msgspec.Struct]],
        most: int,
        wake: Any,
        max_bytes: int = MAX_BYTES,
    ):
        self._arrived: queue.Queue[Question] = queue.Queue()
        self._decoders = {path: msgspec.json.Decoder(kind) for path, kind in paths.items()}
        self._token, self._most, self._wake, self._max_bytes = token, most, wake, max_bytes
        self._open, self._lock = 0, threading.Lock()
        self._refused = 0
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        kind = type("_Server", (_Server,), {"address_family": family})
        self._server = kind((address, 0), self)
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="service").start()

    @property
    def in_flight(self) -> int:
        """Number of questions accepted but not yet answered."""
        return self._open

    def take(self) -> list[Question]:
        """The questions that have arrived since the last call, in order."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._arrived.get_nowait())
        return found

    def take_refused(self) -> int:
        """Number of questions refused with 503 since the last call."""
        with self._lock:
            count, self._refused = self._refused, 0
        return count

    def close(self) -> None:
        """Stop listening; waiting clients get a broken connection."""
        self._server.shutdown()
        self._server.server_close()

    def handle(self, path: str, given: Mapping[str, str], read: Callable[[int], bytes], client: socket.socket) -> Any:
        """(status, content) for a POST request; None if the client is gone."""
        if not hmac.compare_digest(given.get("Authorization", "").encode(), f"Bearer {self._token}".encode()):
            return _error(401, "the token is wrong")
        if (decoder := self._decoders.get(path)) is None:
            return _error(404, f"nothing is served at this path; there are {', '.join(self._decoders)}")
        length = given.get("Content-Length", "")
        if not length.isdecimal():
            return _error(411, "a request needs a Content-Length")
        if int(length) > self._max_bytes:
            return _error(413, f"a request has at most {self._max_bytes} bytes")
        body = read(int(length))
        if len(body) < int(length):
            return None
        try:
            question = Question(decoder.decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # a wrong type is a DecodeError too
            return _error(400, f"the request is not as expected: {error}")
        with self._lock:
            if self._open >= self._most:
                self._refused += 1
                return _error(503, f"{self._open} requests are open, the most is {self._most}")
            self._arrived.put(question)
            self._open += 1
        try:
            self._wake()
            return question.wait(client)
        finally:
            with self._lock:
                self._open -= 1


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, at: tuple[str, int], service: Service):
        self.service = service
        self._room = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(at, _Handler)

    def server_bind(self) -> None:
        """Bind without a look-up of the host name, which may take seconds."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._room.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections; the client handles them."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server_version, sys_version = "hpcrl", ""  # do not reveal versions
    timeout = READ_S
    server: _Server

    def do_POST(self) -> None:
        service = self.server.service
        result = service.handle(self.path, dict(self.headers), self.rfile.read, self.connection)
        if result is None:
            return
        status, content = result
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header(LOAD_HEADER, str(service.in_flight))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def _error(status: int, text: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": text}}


def _has_gone(client: socket.socket) -> bool:
    """Whether the other side has closed the connection."""
    try:
        looking = select.poll()  # select() accepts no descriptor above 1023
        looking.register(client, select.POLLIN)
        return bool(looking.poll(0)) and not client.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True
