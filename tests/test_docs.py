"""The documents are correct: links have targets, and the named commands exist."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from hpcrl.config import load
from hpcrl.launch.__main__ import main
from hpcrl.system.exit_codes import ExitCode
from tests import in_process
from tests.conftest import ROOT

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_has_a_target(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_anchor_is_a_heading(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        headings = re.findall(r"^#+ (.+)$", (document.parent / target if target else document).read_text(), re.M)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{document.name} links to {target}#{anchor}"


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [
        file.name for file in (ROOT / "docs").glob("*.md") if file.name != "README.md" and file.name not in index
    ] == []


def test_every_key_in_the_reference_has_its_own_row() -> None:
    lines = (ROOT / "docs" / "configuration.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) > 200
    assert [line for line in table if not re.fullmatch(r"\|[^|]+(\|[^|]*)?\|[^|]+\|", line)] == []
    # Besides these: headings, and between heading and table a line about the section.
    others = [line for line in lines[3:] if line and line not in table]
    assert all(line.startswith("## ") or before.startswith("## ") for before, line in pairwise(["## ", *others]))


def test_every_make_target_named_in_the_docs_exists_and_is_listed() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.M))
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    named = {word for line in re.findall(r"^make (.+)$", text, re.M) for word in line.split("#")[0].split()}
    assert {"demo", "test", "setup"} <= named <= targets
    assert set(re.findall(r"^\.PHONY: (.+)$", makefile, re.M)[0].split()) == targets


def test_every_launch_command_in_the_readme_is_valid() -> None:
    commands = re.findall(r"^\S*python -m hpcrl\.launch (.+)$", (ROOT / "README.md").read_text(), re.M)
    commands = [command for command in commands if "=" in command]
    assert len(commands) >= 3
    for command in commands:
        assert load(shlex.split(command)).max_steps > 0


def test_every_launch_command_about_environments_is_valid() -> None:
    text = (ROOT / "docs" / "environments.md").read_text().replace("\\\n", " ")
    launch = re.findall(r"^\S*python -m hpcrl\.launch (.+)$", text, re.M)
    keys = re.findall(r"^env\.default\.name=.+$", text, re.M)
    assert len(launch) >= 5 and len(keys) >= 5
    for command in [*launch, *(f"+experiment=agentic_tiny ~env.default.options {line}" for line in keys)]:
        assert load(shlex.split(command)).envs, command


@pytest.mark.slow
def test_the_documented_plan_is_the_output_of_its_command(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "planner.md").read_text()
    command, plan, refusal = re.findall(r"^```\n(.+?)^```$", text, re.M | re.S)
    words = shlex.split(command.removeprefix("python -m hpcrl.launch "))
    done = in_process.run(main, *words, at=tmp_path)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert plan.count("\n") > 10 and f"\n{plan}" in done.stdout, done.stdout
    (wrong,) = re.findall(r"here with\n`([^`]+)`", text)
    done = in_process.run(main, *words, wrong, at=tmp_path)
    assert (done.returncode, done.stderr) == (ExitCode.BAD_INPUT, refusal)
