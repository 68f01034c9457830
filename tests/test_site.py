"""The docs site: `make site` builds it completely, without broken links, and it needs no network."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT

CODE = ROOT / "docs" / "site"
PARTS = ["Start", "Guides", "Reference", "Inside"]


@pytest.fixture
def problems_of() -> Callable[[Path], list[str]]:
    """The check that ends a build."""
    check: Callable[[Path], list[str]] = runpy.run_path(str(CODE / "check.py"))["problems_of"]
    return check


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, set[str]], str]:
    """The result of a build for a page, from its path, its text and all pages."""
    monkeypatch.syspath_prepend(str(CODE))
    made: Callable[[str, str, set[str]], str] = runpy.run_path(str(CODE / "build.py"))["rewritten"]
    return made


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("zensical"), reason="zensical is not installed (extra: docs)")
def test_the_site_is_complete(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, str(CODE / "build.py"), str(site)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    start = (site / "index.html").read_text()
    tabs = re.findall(r'class="md-tabs__link"[^>]*>(.*?)</a>', start, re.S)
    assert [re.sub(r"<[^>]+>|\s", "", tab) for tab in tabs] == PARTS

    pages = {path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    named = {page.with_name("index.html") if page.stem == "README" else page for page in pages}
    assert [page for page in named if not (site / page).is_file()] == []
    assert 'id="trainer.lr"' in (site / "docs" / "configuration.html").read_text()

    # The search index is a script, since a page from file:// may not read other files.
    index = json.loads((site / "search.json").read_text())
    assert (site / "search.js").read_text().startswith("var __index = {")
    found = {item["location"]: item["text"] for item in index["items"]}
    assert "trainer.lr" in found["docs/configuration.html#trainer"]
    assert "docs/rewards.html#write-one" in found
    assert "records an error for the sample" in found["docs/api/rewards.html#hpcrl.rewards.reward.Reward"]
    assert "iframe-worker.js" in start, "what searches in place of a worker, which no browser starts from file://"


def test_every_document_is_in_the_navigation() -> None:
    named = set(re.findall(r": (\S+\.md)$", (CODE / "mkdocs.yml").read_text(), re.M))
    documents = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert documents <= named, "docs/site/mkdocs.yml"
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_broken_and_external_links_are_found(tmp_path: Path, problems_of: Callable) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "one.html").write_text('<h1 id="top">One</h1><a href="../index.html#end">start</a>')
    (tmp_path / "index.html").write_text(
        '<p id="end"></p><a href="docs/one.html#top"></a><a href="https://example.org/paper">a paper</a>'
        '<a href="docs/one.html#bottom"></a><a href="docs/two.html"></a><a href="../outside.html"></a>'
        '<script src="https://cdn.example.org/x.js"></script><img src="plot.svg"><link rel="icon" href="//f.org/f">'
    )
    (tmp_path / "site.css").write_text("@font-face { src: url(https://f.org/font.woff2) }")
    assert problems_of(tmp_path) == [
        "index.html: loads https://cdn.example.org/x.js from another host",
        "index.html: loads //f.org/f from another host",
        "index.html: docs/one.html#bottom: no such anchor",
        "index.html: docs/two.html: no such file",
        "index.html: ../outside.html: no such file",
        "index.html: plot.svg: no such file",
        "site.css: loads from another host",
    ]
    assert problems_of(tmp_path / "none") == [f"{tmp_path / 'none'}: no pages"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[keys](configuration.md#run), [start](../README.md)", "[keys](configuration.md#run), [start](../README.md)"),
        ("[the protocol](../hpcrl/envs/environment.py)", "the protocol (`hpcrl/envs/environment.py`)"),
        ("[`hpcrl/pipelines/`](../hpcrl/pipelines)", "`hpcrl/pipelines/`"),
        ("[gone](../hpcrl/no_such_file.py)", "[gone](../hpcrl/no_such_file.py)"),
        ("[a paper](https://example.org/x)", "[a paper](https://example.org/x)"),
        ("Of these:\n- one\n  more\n- two", "Of these:\n\n- one\n  more\n- two"),
        ("```\nOf these:\n- one\n```", "```\nOf these:\n- one\n```"),
    ],
)
def test_markdown_for_a_forge_is_rewritten_for_the_site(text: str, expected: str, rewritten: Callable) -> None:
    assert rewritten("docs/some.md", text, {"README.md", "docs/configuration.md"}) == expected


def test_each_key_has_an_address(rewritten: Callable) -> None:
    row = "| `trainer.lr` | `1e-06` | Peak learning rate. |"
    expected = '| <span id="trainer.lr"></span>`trainer.lr` | `1e-06` | Peak learning rate. |'
    assert rewritten("docs/configuration.md", row, set()) == expected
    assert rewritten("docs/engines.md", row, set()) == row
