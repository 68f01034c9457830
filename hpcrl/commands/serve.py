"""Serve the reports of all runs below a folder, as they are now, to a browser on this machine.

    python -m hpcrl serve [RUNS_FOLDER] [--host 127.0.0.1] [--port 0]

Prints an address with a random token, without which nothing is served. RUNS_FOLDER (default: runs) is only read. Each
page is made when it is asked for, and made again when the run has written since. Ctrl-C ends the server.

example, on a login node
  python -m hpcrl serve runs --port 8899
      then on your machine: ssh -L 8899:127.0.0.1:8899 LOGIN_NODE, and open the printed address
"""

from __future__ import annotations

import gzip
import hmac
import html
import http.server
import ipaddress
import os
import platform
import secrets
import sys
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hpcrl.commands.report import state_in_words
from hpcrl.commands.status import RUNS
from hpcrl.report.live import LivePages, SlowError
from hpcrl.report.page import document
from hpcrl.report.run_files import not_a_run
from hpcrl.system.cli import ArgumentParser, show, use_utf8
from hpcrl.system.exit_codes import ExitCode

CLIENT_S = 30.0
"""A connection on which the browser sends or takes nothing for so long is closed."""
MAX_UNREAD = 1 << 20
"""Bytes of a refused request's body that are read."""
AGAIN_S = 10
"""Seconds after which the browser asks again for a page that was not ready."""
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class ReportServer(http.server.ThreadingHTTPServer):
    """Serves `pages` under `/TOKEN/`. Port 0 takes a free one (`server_port`)."""

    daemon_threads = True

    def __init__(self, pages: LivePages, host: str, port: int, token: str = ""):
        self.pages, self.token = pages, token or secrets.token_urlsafe(24)
        super().__init__((host, port), _Handler)

    @property
    def address(self) -> str:
        """The address of the index."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/{self.token}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ReportServer
    timeout = CLIENT_S
    server_version, sys_version = "hpcrl", ""

    def do_GET(self) -> None:  # the name is http.server's
        token, slash, rest = unquote(urlsplit(self.path).path.lstrip("/"), errors="surrogateescape").partition("/")
        if not hmac.compare_digest(os.fsencode(token), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, _message("The address lacks the token that `hpcrl serve` printed."))
            return
        if not slash:  # the index's links are relative
            self._answer(HTTPStatus.PERMANENT_REDIRECT, _message("The list of runs."), {"Location": f"/{token}/"})
            return
        name = rest.removeprefix("run/") if rest.startswith("run/") else None
        if rest and name is None:
            self._answer(HTTPStatus.NOT_FOUND, _message("There is no such page."))
            return
        try:
            text = self.server.pages.index() if name is None else self.server.pages.report(name)
        except SlowError as error:
            text = f"The file system is slow: {error}. The page is still being made; it loads by itself."
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, _message(text), {"Refresh": str(AGAIN_S)})
        except KeyError:
            self._answer(HTTPStatus.NOT_FOUND, _message(f"There is no run {name} in {self.server.pages.root}."))
        except (OSError, ValueError) as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, _message(f"The run cannot be read: {error}"))
        else:
            self._answer(HTTPStatus.OK, text)

    do_HEAD = do_GET  # the names are http.server's

    def _refuse(self) -> None:
        """Takes the body first, as far as it is short: with the rest unread, some clients miss the answer."""
        length = self.headers.get("Content-Length", "0")
        self.rfile.read(min(int(length), MAX_UNREAD) if length.isascii() and length.isdigit() else 0)
        text = f"{self.command} is not possible here: pages are only read, with GET or HEAD."
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, _message(text), {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _answer(self, status: HTTPStatus, text: str, more: dict[str, str] | None = None) -> None:
        body, packed = text.encode(), {}
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            body, packed = gzip.compress(body, 3), {"Content-Encoding": "gzip"}
        self.send_response(status)
        for name, value in {**HEADERS, **packed, **(more or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: requests have the token."""


def _message(text: str) -> str:
    return document("hpcrl", [f"<p>{html.escape(text)}</p>"])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port {text}: a port is a number from 0 (any free port) to 65535")
    return port


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    parser = ArgumentParser("hpcrl serve", __doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS, metavar="RUNS_FOLDER", help="default: runs")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; default: 127.0.0.1, this machine only"
    )
    parser.add_argument("--port", default="0", help="default: 0, any free port")
    try:
        arguments = parser.parse_args(argv)
        folder, port = arguments.folder, _port(arguments.port)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give the folder that contains run folders")
        if not not_a_run(folder):
            raise ValueError(f"{folder} is a run; give the folder above it, {folder.resolve().parent}")
        try:
            server = ReportServer(LivePages(folder, state_in_words), arguments.host, port)
        except OSError as error:
            place = f"{arguments.host}:{port}"
            raise ValueError(f"{place} cannot be used: {error.strerror or error}; choose another --port") from error
    except (ValueError, OSError) as error:
        print(f"hpcrl: {error} (see --help)", file=sys.stderr)
        return ExitCode.BAD_INPUT
    show(server.address)
    if _is_loopback(arguments.host):
        via = f"ssh -L {server.server_port}:{arguments.host}:{server.server_port} {platform.node()}"
        print(f"reports of the runs in {folder}; from another machine: {via}; Ctrl-C ends this", file=sys.stderr)
    else:
        print(f"everyone who reaches {arguments.host} and has this address can read the runs; Ctrl-C", file=sys.stderr)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return ExitCode.DONE


if __name__ == "__main__":
    use_utf8()
    sys.exit(main())
