"""hpcrl.launch.prefetch against a hub on this machine that speaks the four requests huggingface_hub makes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.test_launch import write_model

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves ROOT/models/ORG/NAME/* and ROOT/datasets/ORG/NAME/*; `served`: every file whose content was downloaded."""

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.served = root, list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[0] == "api":  # api/models/ORG/NAME/revision/REV, api/models/ORG/NAME/tree/REV
            return self._tell(self.server.root.joinpath(*parts[1:4]), parts[4:])
        kind = [] if parts[0] == "datasets" else ["models"]  # [datasets/]ORG/NAME/resolve/REV/FILE
        at = parts.index("resolve")
        file = self.server.root.joinpath(*kind, *parts[:at], *parts[at + 2 :])
        if not file.is_file():
            return self._send(404, {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET":
            self.server.served.append(file.name)
        etag = f'"{hashlib.sha1(file.read_bytes()).hexdigest()}"'
        return self._send(200, {"ETag": etag, "X-Repo-Commit": SHA}, file.read_bytes())

    def _tell(self, folder: Path, what: list[str]) -> None:
        if folder.name == "gated":
            return self._send(403, {"X-Error-Code": "GatedRepo"})
        if not folder.is_dir():
            return self._send(404, {"X-Error-Code": "RepoNotFound"})
        if what[1] not in ("main", SHA):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
        texts = {str(path): (folder / path).read_bytes() for path in files}
        tree = [
            {"type": "file", "path": path, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
            for path, text in texts.items()
        ]
        about = {"id": folder.name, "sha": SHA, "siblings": [{"rfilename": path} for path in texts]}
        body = json.dumps(tree if what[0] == "tree" else about).encode()
        return self._send(200, {"Content-Type": "application/json"}, body)

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with the model org/tiny, which has the same weights also in another format and in a folder."""
    folder = write_model(tmp_path / "hub" / "models" / "org" / "tiny")
    for name in ("pytorch_model.bin", "original/params.json", "README.md", "merges.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    data = tmp_path / "hub" / "datasets" / "org" / "digits" / "main" / "train.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text('{"prompt": "1", "answer": "1"}\n')
    with Hub(tmp_path / "hub") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def prefetch(tmp_path: Path, endpoint: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return python(tmp_path, "-m", "hpcrl", "prefetch", *words, HF_ENDPOINT=endpoint, **more)


def prefetch_each(tmp_path: Path, endpoint: str, *lines: Sequence[str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of several command lines, one after another in one process, since a start takes most
    of the time."""
    code = (
        "import json, sys; from pathlib import Path\n"
        "from hpcrl.launch.prefetch import main; from tests import in_process\n"
        "done = [in_process.run(main, *words, at=Path()) for words in json.loads(sys.argv[1])]\n"
        "print(json.dumps([(each.returncode, each.stdout, each.stderr) for each in done]))"
    )
    done = python(tmp_path, "-c", code, json.dumps(lines), HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


def python(tmp_path: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ |= {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_a_model_is_cached_where_an_offline_node_finds_it(tmp_path: Path, hub: Hub) -> None:
    done = prefetch(tmp_path, hub.url, "org/tiny")
    assert done.returncode == ExitCode.DONE, done.stderr
    path = Path(done.stdout.strip())
    assert path.is_relative_to(tmp_path / "home")
    wanted = ["config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
    assert sorted(hub.served) == sorted(entry.name for entry in path.iterdir()) == wanted

    find = "from hpcrl.launch.hub import find_model; print(find_model('org/tiny', plan_only=False))"
    found = python(tmp_path, "-c", find, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert found.stdout.strip() == str(path), found.stderr

    again = prefetch(tmp_path, hub.url, "org/tiny")
    assert again.stdout == done.stdout and sorted(hub.served) == wanted


@pytest.mark.slow
def test_a_model_and_a_data_file_can_be_fetched_into_a_folder(tmp_path: Path, hub: Hub) -> None:
    words = ("org/tiny", "--folder", "here"), ["datasets/org/digits/main/train.jsonl"]
    (_, folder, told), (_, file, told_of_file) = prefetch_each(tmp_path, hub.url, *words)
    assert folder.strip() == str(tmp_path / "here"), told
    assert (tmp_path / "here" / "model.safetensors").is_file()
    assert json.loads(Path(file.strip()).read_text())["answer"] == "1", told_of_file


def test_a_corrupted_download_is_refused(tmp_path: Path, hub: Hub) -> None:
    (hub.root / "models" / "org" / "tiny" / "model.safetensors").write_bytes(b"<html>not a model</html>")
    done = prefetch(tmp_path, hub.url, "org/tiny")
    assert done.returncode == ExitCode.BAD_INPUT and done.stdout == ""
    assert done.stderr.startswith("org/tiny: ") and "model.safetensors" in done.stderr


REFUSED = {
    ("org/nothing",): "org/nothing is not on the hub",
    ("org/gated",): "org/gated is gated: accept its terms on the hub and set HF_TOKEN",
    ("org/tiny", "--revision", "v9"): "org/tiny has no such --revision",
    ("not a name",): "not a name: expected ORG/NAME, or datasets/ORG/NAME/FILE",
    ("datasets/org/digits",): "datasets/org/digits: expected ORG/NAME, or datasets/ORG/NAME/FILE",
    ("datasets/org/digits/none.jsonl",): "datasets/org/digits/none.jsonl is a data set without that file",
    ("org/tiny", "org/two", "--folder", "x"): "--folder: a folder can hold one model; give one NAME",
}


@pytest.mark.slow
def test_a_failed_download_is_reported_in_one_line(tmp_path: Path, hub: Hub) -> None:
    found = prefetch_each(tmp_path, hub.url, *REFUSED)
    for (code, out, err), told in zip(found, REFUSED.values(), strict=True):
        assert (code, out, len(err.splitlines())) == (ExitCode.BAD_INPUT, "", 1), err
        assert err.startswith(told)


@pytest.mark.slow
def test_a_missing_network_is_reported_in_one_line(tmp_path: Path) -> None:
    done = prefetch(tmp_path, "http://127.0.0.1:9", "org/tiny")
    assert done.returncode == ExitCode.BAD_INPUT and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("org/tiny could not be downloaded from http://127.0.0.1:9: ")
    offline = prefetch(tmp_path, "http://127.0.0.1:9", "org/tiny", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in offline.stderr and offline.returncode == ExitCode.BAD_INPUT
