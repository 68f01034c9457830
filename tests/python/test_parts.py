"""A function or class goes to a run by its path, if every process of the run can import it; else it is refused."""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpcrl.python.parts import path_of
from hpcrl.rewards.function import load_function

PARTS = """\
import functools

def score(completions, **columns):
    return [float(len(text)) for text in completions]

class Game:
    class Inner:
        pass

def make():
    def inner(items):
        return []
    return inner

def wrap(function):
    @functools.wraps(function)
    def wrapped(*words, **keys):
        return function(*words, **keys)
    return wrapped

@wrap
def decorated(items):
    return [1.0]

made = make()
anonymous = lambda items: []
bound = functools.partial(score)

if True:
    def conditional(items):
        return []
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "own_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    return importlib.import_module("own_parts")


@pytest.mark.parametrize("name", ["score", "Game", "decorated", "conditional"])
def test_a_part_of_a_file_is_given_by_its_file(parts: ModuleType, tmp_path: Path, name: str) -> None:
    assert path_of(getattr(parts, name)) == f"{tmp_path}/own_parts.py:{name}"


def test_the_path_leads_to_the_same_function(parts: ModuleType) -> None:
    loaded = load_function(path_of(parts.score))
    assert loaded(["ab", "c"]) == [2.0, 1.0] and loaded is not parts.score


@pytest.mark.parametrize(
    ("get", "text"),
    [
        (lambda m: m.anonymous, "a lambda, so no other process can import it"),
        (lambda m: m.made, "make.<locals>.inner: made inside a function"),
        (lambda m: m.bound, "partial has no name by which a run imports it"),
        (lambda m: m.Game(), "Game has no name by which a run imports it"),
        (lambda m: m.Game.Inner, "Game.Inner: below a class"),
        (lambda m: functools.partial(m.score), "give a function or class of a file"),
        (lambda m: exec("def late(items): ...", vars(m)) or m.late, "does not define it at its top level"),
        (lambda m: (m.score, setattr(m, "score", None))[0], "not what"),
    ],
)  # fmt: skip
def test_what_only_this_process_has_is_refused(parts: ModuleType, get: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        path_of(get(parts))
    assert "\n" not in str(error.value)


def test_an_installed_part_is_given_by_its_module() -> None:
    assert path_of(importlib.import_module("pydantic").BaseModel) == "pydantic.main:BaseModel"


def python(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": root} | variables
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


PACKAGE = "import sys; sys.path.insert(0, 'lib')\nimport own.parts\nfrom hpcrl.python.parts import path_of\n"


def test_a_package_must_be_found_by_a_new_process(tmp_path: Path) -> None:
    (tmp_path / "lib" / "own").mkdir(parents=True)
    (tmp_path / "lib" / "own" / "__init__.py").touch()
    (tmp_path / "lib" / "own" / "parts.py").write_text("def score(items): ...")
    refused = python(tmp_path, "-c", f"{PACKAGE}path_of(own.parts.score)")
    assert f"a new process does not find the package own of {tmp_path}/lib" in refused.stderr.splitlines()[-1]
    root = Path(__file__).resolve().parents[2]
    given = python(tmp_path, "-c", f"{PACKAGE}print(path_of(own.parts.score))", PYTHONPATH=f"{root}:{tmp_path}/lib")
    assert given.stdout == "own.parts:score\n", given.stderr


SCRIPT = "from hpcrl.python.parts import path_of\ndef score(items): ...\n"


def test_a_script_gives_its_own_parts_only_below_the_guard(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f'{SCRIPT}if __name__ == "__main__":\n    print(path_of(score))\n')
    assert python(tmp_path, "train.py").stdout == f"{script}:score\n"
    script.write_text(f"{SCRIPT}print(path_of(score))\n")
    line = python(tmp_path, "train.py").stderr.splitlines()[-1]
    assert "would train again; move line 3, which calls hpcrl, below if __name__ ==" in line
    script.write_text('from hpcrl.python.parts import path_of\nif __name__ == "__main__":\n'
                      "    def score(items): ...\n    print(path_of(score))\n")  # fmt: skip
    assert "does not define it at its top level" in python(tmp_path, "train.py").stderr.splitlines()[-1]


def test_what_was_typed_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for words in (["-c", f"{SCRIPT}path_of(score)"], ["-c", f"exec({SCRIPT + 'path_of(score)'!r})"]):
        line = python(tmp_path, *words).stderr.splitlines()[-1]
        assert "score: defined in no file" in line and "%%writefile my_parts.py" in line
