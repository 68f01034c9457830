"""A thread-safe client of endpoints with one model: retries with back-off until a deadline, a rate limit, a cache.

Uses only the standard library. A request is repeated after a broken connection, a timeout, and the status codes of a
busy or starting server; any other refusal (a wrong key, an unknown model) is an error at once. Redirects are not
followed, since they would forward the key.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import ipaddress
import json
import os
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from email.message import Message
from pathlib import Path
from typing import Any

from hpcrl.rewards.services import DOWN_S, LOAD_HEADER, Addresses

MAX_BYTES = 1 << 20
"""Maximum size of an answer."""
MAX_WAIT_S = 30.0
"""Maximum pause between two attempts, even if the server requests more."""
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 529})


class EndpointError(RuntimeError):
    """The endpoint refused, or did not answer before the deadline."""


class EndpointRefusal(EndpointError):
    """The endpoint refused with a status that no repetition changes."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error, since it would forward the token."""

    def redirect_request(self, *args: Any) -> None:
        return None


class Endpoint:
    """One model behind one or several URLs. Every method is thread-safe. Servers in the cluster, and with `token` all
    servers, are called without a proxy.

    Args:
        timeout_s: The timeout of a single request.
        backoff_s: The pause before the first repetition; later pauses double.
        key_env: The environment variable that contains the bearer token.
        token: The run's own token, which replaces key_env if the servers are ranks of this run.
        max_requests_per_s: The rate limit of this process. None means no limit.
        max_bytes: The maximum size of an answer.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float,
        backoff_s: float,
        key_env: str | None = None,
        token: str = "",
        max_requests_per_s: float | None = None,
        max_bytes: int = MAX_BYTES,
    ):
        self._addresses = Addresses(urls)
        self._several = len(urls) > 1
        self._key_env, self._token, self._timeout_s, self._backoff_s = key_env, token, timeout_s, backoff_s
        self._max_bytes = max_bytes
        self._interval_s = 1.0 / max_requests_per_s if max_requests_per_s else 0.0
        self._direct = urllib.request.build_opener(NoRedirects, urllib.request.ProxyHandler({}))
        self._proxied = urllib.request.build_opener(NoRedirects)
        self._lock = threading.Lock()
        self._free_at = 0.0  # monotonic time from which the next request may start

    def ask(self, body: Mapping[str, Any] | None, deadline: float, counts: Counter[str]) -> bytes:
        """The answer to a JSON object, None for a GET request. All attempts end at `deadline` (monotonic time);
        requests and retries are added to `counts`. EndpointError if there is no answer, ValueError if the answer is
        too long."""
        data = None if body is None else json.dumps(body).encode()
        pause_s, problem = self._backoff_s, "no time left"
        url = "endpoint"
        while self._take_turn(deadline):
            counts["requests"] += 1
            url, told, down_s = self._addresses.take(), None, 0.0
            try:
                answer, told = self._post(url, data, deadline)
                return answer
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}: {self._excerpt(error)}{self._way(url)}"
                if error.code not in TRANSIENT:
                    raise EndpointRefusal(f"{url}: {problem}", error.code) from None
                wait_s, told = _retry_after_s(error), _load(error.headers)
                down_s = wait_s or pause_s
            except (OSError, http.client.HTTPException) as error:
                problem, wait_s, down_s = f"{type(error).__name__}: {error}{self._way(url)}", 0.0, DOWN_S
            finally:
                self._addresses.done(url, told, down_s)
            counts["retries"] += 1
            if self._several and self._addresses.any_up():
                continue
            # Jitter, so threads that failed together do not retry together.
            wait_s = min(max(wait_s, pause_s * random.uniform(0.5, 1.0)), MAX_WAIT_S)
            pause_s = min(2 * pause_s, MAX_WAIT_S)
            if wait_s >= deadline - time.monotonic():
                break
            time.sleep(wait_s)
        raise EndpointError(f"{url}: no answer in time; the last attempt: {problem}")

    def _take_turn(self, deadline: float) -> bool:
        """Wait for the rate limit; False if the turn would come after the deadline."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            if start >= deadline:
                return False
            self._free_at = start + self._interval_s
        time.sleep(start - now)
        return True

    def _proxy(self, url: str) -> str:
        """The environment's proxy (http_proxy, https_proxy) for a URL; empty without one."""
        parts = urllib.parse.urlsplit(url)
        if self._token or in_cluster(parts.hostname or "") or urllib.request.proxy_bypass(parts.netloc):
            return ""
        return urllib.request.getproxies().get(parts.scheme, "")

    def _way(self, url: str) -> str:
        return f" (through the proxy {proxy}, unless no_proxy names the host)" if (proxy := self._proxy(url)) else ""

    @property
    def _key(self) -> str:
        return self._token if self._key_env is None else os.environ.get(self._key_env, "")

    def _excerpt(self, error: urllib.error.HTTPError) -> str:
        """The beginning of a refusal's text, without the key, which a server may repeat."""
        try:
            text = " ".join(error.read(400).decode(errors="replace").split())
        except OSError as reading:
            return f"({type(reading).__name__})"
        text = text.replace(self._key, "***") if self._key else text
        return "".join(sign if sign.isprintable() else "?" for sign in text[:200])

    def _post(self, url: str, data: bytes | None, deadline: float) -> tuple[bytes, int | None]:
        """(the answer's body, the number of open requests that the answering rank reported)."""
        headers, key = {"Content-Type": "application/json"}, self._key
        if self._key_env is not None and not key:
            raise EndpointError(f"the environment variable {self._key_env} with the key of {url} is not set")
        if not (key.isascii() and (key.isprintable() or not key)):
            raise EndpointError(f"the key in {self._key_env} has characters that are not allowed in an HTTP header")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(url, data, headers)
        end = min(deadline, time.monotonic() + self._timeout_s)
        opener = self._proxied if self._proxy(url) else self._direct
        with opener.open(request, timeout=max(0.01, end - time.monotonic())) as response:
            body = bytearray()
            while block := response.read1(1 << 16):
                body += block
                if len(body) > self._max_bytes:
                    raise ValueError(f"the answer has more than {self._max_bytes} bytes")
                if time.monotonic() > end:  # bytes arrive slowly: the socket's timeout covers only one read
                    raise TimeoutError("the answer did not end in time")
            if response.length:  # fewer bytes than the headers declare
                raise http.client.IncompleteRead(bytes(body), response.length)
        return bytes(body), _load(response.headers)


def in_cluster(host: str) -> bool:
    """Whether a host is this machine or in its cluster: local or private address, or name without public domain."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith((".local", ".localdomain", ".internal", ".cluster", ".lan"))
    return address.is_loopback or address.is_private or address.is_link_local


class Cache:
    """Verdicts in a folder, one small file each, shared by all processes. A damaged file counts as missing."""

    def __init__(self, folder: Path):
        self._folder = folder

    def path(self, asked: Any) -> Path:
        """The file for a request: everything that determines the verdict, as plain data."""
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        return self._folder / digest[:2] / f"{digest}.json"

    def read(self, path: Path) -> float | None:
        """The verdict; None if it is not cached."""
        try:
            return float(json.loads(path.read_bytes())["verdict"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path, verdict: float) -> None:
        """Cache a verdict. On a full disk the entry is missing, but the sample does not fail."""
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
            temporary.write_text(json.dumps({"verdict": verdict}))
            temporary.replace(path)


def content_of(body: bytes) -> str:
    """The text of the first choice of a chat completion. ValueError for anything else."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"the answer is not a chat completion: {type(error).__name__}") from error
    if not isinstance(content, str):
        raise ValueError("the answer has no text")
    return content


def _load(headers: Message) -> int | None:
    given = headers.get(LOAD_HEADER, "")
    return int(given) if given.isdecimal() else None


def _retry_after_s(error: urllib.error.HTTPError) -> float:
    """The server's Retry-After in seconds; 0 if it is missing or a date."""
    try:
        return max(0.0, float(error.headers.get("Retry-After", "")))
    except ValueError:
        return 0.0
