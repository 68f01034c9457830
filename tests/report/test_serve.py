"""`hpcrl serve`: the token, nothing outside of the folder, pages that follow their runs, a slow file system."""

from __future__ import annotations

import gzip
import html
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpcrl.commands.serve import ReportServer, main
from hpcrl.report.live import DeadlineWork, LivePages, SlowError
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.report.synthetic import row, write_run
from tests.report.test_page import blocks


@contextmanager
def serving(pages: LivePages, token: str = "secret") -> Iterator[ReportServer]:
    server = ReportServer(pages, "127.0.0.1", 0, token)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def known(folder: Path) -> str:
    return f"finished: {folder.name}"


def get(server: ReportServer, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
    """Status, headers and text, for a path that is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.putrequest("GET", path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        packed = answer.headers.get("Content-Encoding") == "gzip"
        return answer.status, answer.headers, (gzip.decompress(body) if packed else body).decode()
    finally:
        connection.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "one")
    write_run(tmp_path / "runs" / "sweep" / "two")
    (tmp_path / "runs" / "empty").mkdir()
    return tmp_path / "runs"


def test_the_index_and_the_reports(runs: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(runs.rglob("*"))}
    with serving(LivePages(runs, known)) as server:
        status, headers, text = get(server, "/secret/")
        assert status == 200 and headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
        assert 'href="./run/one"' in text and 'href="./run/sweep/two"' in text and "empty" not in text
        assert "finished: one" in text and "30/30" in text
        status, _, text = get(server, "/secret/run/one")
        head = blocks(text)["report-head"]
        assert status == 200 and head["runs"][0]["name"] == "one" and head["index"] == "../"
        status, _, packed = get(server, "/secret/run/sweep/two", Accept_Encoding="gzip")
        assert blocks(packed)["report-head"]["index"] == "../../"
    assert {path: path.stat().st_mtime_ns for path in sorted(runs.rglob("*"))} == before


def test_only_get_and_head_are_answered(runs: Path) -> None:
    """The token without a slash leads to the list, so that its relative links work."""
    with serving(LivePages(runs, known)) as server:
        status, headers, _ = get(server, "/secret")
        assert status == 308 and headers["Location"] == "/secret/"
        assert get(server, "/secre")[0] == get(server, "/")[0] == 403
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        for path, status in {"/secret/": 200, "/secret/run/one": 200, "/secret/run/none": 404, "/wrong/": 403}.items():
            length = len(get(server, path)[2].encode())
            connection.request("HEAD", path)
            answer = connection.getresponse()
            assert (answer.status, answer.read(), answer.headers["Content-Length"]) == (status, b"", str(length))
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            connection.request(method, "/secret/", body=b"x" * 500_000 if method == "PUT" else b"x=1")
            answer = connection.getresponse()
            assert answer.status == 405 and answer.headers["Allow"] == "GET, HEAD"
            assert f"<p>{method} is not possible here: pages are only read" in answer.read().decode()


def test_without_the_token_nothing_is_served(runs: Path) -> None:
    with serving(LivePages(runs, known)) as server:
        for path in ("/", "/run/one", "/wrong/", "/wrong/run/one", "/secre/", "/secret2/", "/%ff/", "/%73ecret%2f/x"):
            status, _, text = get(server, path)
            assert (status, path) == (404 if path.startswith("/%73") else 403, path)
            assert "report-head" not in text and "<table" not in text


def test_nothing_outside_of_the_folder_is_served(runs: Path) -> None:
    write_run(runs.parent / "secret")
    (runs / "link").symlink_to(runs.parent / "secret")
    (runs / "sweep" / "out").symlink_to(runs.parent / "secret")
    names = ["..", "../runs/one", "one/..", "one/../one", "/etc", "%2e%2e/secret", "..%2fsecret", ".", "", "link"]
    with serving(LivePages(runs, known)) as server:
        for name in (*names, "sweep/out", "one/config.yaml", "a%00b", "absent"):
            status, _, text = get(server, f"/secret/run/{name}")
            assert (status, name) == (404, name) and "report-head" not in text
        index = get(server, "/secret/")[2]
        assert "run/one" in index and "run/link" not in index and "run/sweep/out" not in index


def test_links_in_a_run_that_lead_out_are_not_followed(runs: Path) -> None:
    (runs.parent / "key").write_text("PRIVATE KEY")
    (runs / "one" / "plan.txt").symlink_to(runs.parent / "key")
    (runs / "one" / "errors.json").symlink_to("errors.json")  # a circle
    os.rename(runs / "one" / "abandoned", runs.parent / "abandoned")
    (runs / "one" / "abandoned").symlink_to(runs.parent / "abandoned")
    (runs / "one" / "slurm" / "job-50.log").unlink()
    (runs / "one" / "slurm" / "job-50.log").symlink_to(runs / "sweep" / "two" / "slurm" / "job-50.log")  # stays inside
    with serving(LivePages(runs, known)) as server:
        text = get(server, "/secret/run/one")[2]
    assert "PRIVATE KEY" not in text
    found = blocks(text)
    problems = {problem.partition(":")[0].partition("/")[0] for problem in found["report-head"]["runs"][0]["problems"]}
    assert problems == {"abandoned", "errors.json", "plan.txt"}
    assert found["data-0-overview"]["attempts"][0]["end"] == "preempted"


def test_names_that_addresses_and_pages_must_quote(runs: Path) -> None:
    for name in (b"bad\xff<b>", b"a b%2f&#?'\""):
        write_run(runs / "made").rename(os.fsdecode(bytes(runs) + b"/" + name))
    with serving(LivePages(runs, known)) as server:
        status, _, index = get(server, "/secret/")
        assert status == 200 and "bad\\udcff&lt;b&gt;" in index
        links = [html.unescape(link) for link in re.findall(r'href="\./(run/[^"]*)"', index)]
        assert {"run/bad%FF%3Cb%3E", "run/a%20b%252f%26%23%3F%27%22"} < set(links)
        assert [get(server, f"/secret/{link}")[0] for link in links] == [200] * len(links)


def test_a_page_follows_its_run(runs: Path) -> None:
    pages = LivePages(runs, known)
    with serving(pages) as server:
        first = get(server, "/secret/run/one")[2]
        assert get(server, "/secret/run/one")[2] == first  # kept: even the time of writing is the same
        with open(runs / "one" / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row(31)) + "\n" + json.dumps(row(32))[:50])
        found = blocks(get(server, "/secret/run/one")[2])["data-0-curves"]
        assert max(max(grid) for grid in found["grids"]) == 31
        assert "31/30" in get(server, "/secret/")[2]
        write_run(runs / "three")
        assert 'href="./run/three"' in get(server, "/secret/")[2]


def test_a_slow_file_system_does_not_block_other_requests(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, released, pages = threading.Event(), threading.Event(), LivePages(runs, known, deadline_s=100.0)
    fast = LivePages._open

    def open_slowly(self: LivePages, folder: Path, *more: Any):
        if folder.name == "one":
            asked.set()
            released.wait(100)
        return fast(self, folder, *more)

    monkeypatch.setattr(LivePages, "_open", open_slowly)
    with serving(pages) as server:
        slow = threading.Thread(target=get, args=(server, "/secret/run/one"))
        slow.start()
        assert asked.wait(20)
        assert get(server, "/secret/run/sweep/two")[0] == 200
        pages.deadline_s = 0.2
        status, headers, text = get(server, "/secret/run/one")
        assert status == 503 and "file system is slow" in text and headers["Refresh"]
        pages.deadline_s = 10.0  # of which the list waits a quarter for one run
        index = get(server, "/secret/")[2]
        assert "the file system is slow" in index and "finished: two" in index
        assert slow.is_alive(), "the first request waits through all of it"
        released.set()
        assert get(server, "/secret/run/one")[0] == 200
        slow.join(20)
        assert not slow.is_alive()


def test_a_silent_slurm_costs_the_state_only(runs: Path) -> None:
    released = threading.Event()

    def state(folder: Path) -> str:
        released.wait(30)
        return "running"

    pages = LivePages(runs, state, state_s=0.1)
    with serving(pages) as server:
        what = dict(blocks(get(server, "/secret/run/one")[2])["data-0-overview"]["what"])
    released.set()
    assert what["state"] == "unknown: Slurm did not answer in time" and what["steps"] == "30 of 30"


def test_work_is_shared_bounded_and_forgets_errors() -> None:
    released, calls, work = threading.Event(), [], DeadlineWork(most=1)

    def make() -> int:
        calls.append(1)
        released.wait(30)
        return 7

    for _ in range(2):
        with pytest.raises(SlowError, match="no answer within"):
            work.get("a", make, 0.05)
    with pytest.raises(SlowError, match="1 pages are in work"):
        work.get("b", make, 0.05)
    released.set()
    assert len(calls) == 1
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            assert work.get("b", lambda: 8, 5) == 8
            break
        except SlowError:
            time.sleep(0.01)
    with pytest.raises(ZeroDivisionError):
        work.get("c", lambda: 1 // 0, 5)
    assert work.get("c", lambda: 1, 5) == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["{runs}/absent"], "is not a folder"),
        (["{runs}/one"], "is a run; give the folder above it, {runs}"),
        (["{runs}", "--port", "70000"], "--port 70000: a port is a number from 0"),
        (["{runs}", "--port", "x"], "--port x: a port is a number from 0"),
        (["{runs}", "--host", "192.0.2.1"], "192.0.2.1:0 cannot be used: "),
    ],
)
def test_bad_arguments(runs: Path, arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.format(runs=runs) for word in arguments]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert error.format(runs=runs) in told and told.count("\n") == 1


@pytest.mark.slow
def test_the_command_prints_an_address_and_ends_with_ctrl_c(runs: Path) -> None:
    command = [sys.executable, "-m", "hpcrl", "serve", str(runs)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().strip()  # type: ignore[union-attr]
            host, _, rest = address.removeprefix("http://").partition("/")
            token = rest.strip("/")
            assert host.startswith("127.0.0.1:") and len(token) >= 32
            connection = http.client.HTTPConnection(host, timeout=30)
            connection.request("GET", f"/{token}/run/one")
            assert connection.getresponse().status == 200
            connection.close()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert "ssh -L" in process.stderr.read()  # type: ignore[union-attr]
        finally:
            process.kill()
