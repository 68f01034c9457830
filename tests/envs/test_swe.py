"""Repairing a repository: commands in the sandbox, hidden tests, cheats and limits."""

from __future__ import annotations

import json
import random
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvConfig, parse
from hpcrl.data import read_splits
from hpcrl.envs.factory import make_env, validate_envs
from hpcrl.envs.swe.bugs import SUBJECTS, repair
from hpcrl.envs.swe.hidden import split_imports
from hpcrl.envs.swe.repository import files_of, num_tests
from hpcrl.envs.swe.row_check import problem_of_row
from tests.contracts import test_env as contract

FILES = {"calc/__init__.py": "", "calc/core.py": "def double(x):\n    return x + 1\n"}
TESTS = {
    "test_a.py": "from calc.core import double\n\ndef test_one():\n    assert double(1) == 2\n\n"
    "def test_two():\n    assert double(3) == 6\n"
}
PLAIN: dict[str, Any] = {"prompt": "{observation}", "turn": "{observation}", "invalid": "{observation}", "tag": ""}
RIGHT = "def double(x):\n    return 2 * x\n"


@contextmanager
def episode(row: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """A started episode in the row's repository."""
    columns = {"files": FILES, "hidden_tests": TESTS} if row is None else row
    env: Any = make_env(EnvConfig(name="swe", options=PLAIN | options), {"prompt": "Double.", "extra": columns})
    try:
        env.first = env.reset(0)[0]
        yield env
    finally:
        env.close()


@pytest.mark.slow
def test_the_environment_contract_holds() -> None:
    case = contract.Case("swe", {}, [f"<bash>{word}</bash>" for word in ("ls", "echo x > y; cat y", "false", "submit")])
    first = contract.play(contract.made(case), 5, case.responses)
    assert contract.play(contract.made(case), 5, case.responses) == first
    contract.test_concurrent_episodes_do_not_affect_each_other(case)
    contract.made(case).close()  # type: ignore[attr-defined]  # before its first reset
    for response in ("", "<bash>", "<bash>\0</bash>", "<bash>\ud800</bash>", "<bash>" + "9" * 50_000 + "</bash>"):
        contract.test_an_invalid_action_changes_nothing_and_is_counted(case._replace(responses=[]), response)
    contract.test_a_step_needs_a_running_episode(case)


@pytest.mark.slow
def test_a_repair_by_hand() -> None:
    with episode(prompt="{task}|{observation}") as env:
        assert env.first == "Double.|./calc/__init__.py\n./calc/core.py"
        assert env.step("cat calc/core.py")[0] == FILES["calc/core.py"].strip()
        assert env.step("false")[0] == "(exit code 1)"
        assert env.step("python -c 'from calc.core import double; print(double(1), double(3))'")[0] == "2 4"
        env.step(f"cat > calc/core.py <<'EOF'\n{RIGHT}EOF")
        text, reward, *ended, info = env.step("submit")
        assert (text, reward, ended) == ("2 of 2 hidden tests pass.", 1.0, [True, False])
        assert info["metrics"] == {"success": 1.0, "action_is_valid": 1.0, "action_is_effective": 4 / 5}
        env.reset(0)
        assert env.step("submit")[:2] == ("1 of 2 hidden tests pass.", 0.0), "a new episode has the files of the row"
    with episode(partial=True) as env:
        assert env.step("submit")[1] == 0.5


@pytest.mark.slow
def test_hidden_tests_cannot_be_found_and_no_cheat_passes() -> None:
    cheats = [
        "import os\nos._exit(0)\n",
        "class Always:\n    def __eq__(self, other):\n        return True\n\ndef double(x):\n    return Always()\n",
        "import sys\n\ndef double(x):\n    sys.exit(0)\n",
        "import os\n\ndef double(x):\n    os.write(3, b'{}')\n    return 0\n",
    ]
    with episode() as env:
        for cheat in cheats:
            env.reset(0)
            assert "test_a" not in env.step("find / -name 'test_a*' 2>/dev/null; ls -aR; env")[0]
            env.step(f"cat > calc/core.py <<'EOF'\n{cheat}EOF")
            env.step("printf 'import builtins\\nbuiltins.AssertionError = None\\n' > sitecustomize.py")
            assert env.step("submit")[1:3] == (0.0, True), cheat


@pytest.mark.slow
def test_limits_are_enforced_and_the_folder_is_kept() -> None:
    with episode(command_timeout_s=3.0, output_chars=100, max_output_kib=64) as env:
        env.step("echo kept > file; (sleep 1000; echo late > file) & disown")
        assert "stopped by the time limit" in env.step("sleep 30")[0]
        text = env.step("cat file; seq 1 200")[0]
        assert text.startswith("kept") and "characters left out]" in text and text.endswith("200")
        assert "stopped by the output limit" in env.step("yes")[0]
        assert env.step("cat file; pgrep -c sleep; cat /etc/shadow")[0].startswith("kept")
        refused = env.step("python -c 'import socket; socket.create_connection((\"127.0.0.1\", 1))'")[0]
        assert "Refused" not in refused and "exit code 1" in refused and env.step("cat file")[0] == "kept"


def test_every_generated_bug_fails_a_test_and_its_repair_passes() -> None:
    """Runs without the sandbox, since hpcrl itself generates this code."""

    def failing(code: str, values: dict[str, str]) -> int:
        space: dict[str, Any] = {}
        exec(code, space)
        return sum(eval(call, space) != eval(value) for call, value in values.items())

    for subject in SUBJECTS:
        assert failing(subject.code, subject.values) == 0
        for right, wrongs in subject.bugs.items():
            assert all(failing(subject.code.replace(right, wrong, 1), subject.values) for wrong in wrongs)
    assert len({str(repair(seed)) for seed in range(300)}) > 200
    assert repair(7) == repair(7)


@pytest.mark.slow
def test_the_expert_repairs_generated_bugs() -> None:
    for seed in (0, 1):
        with episode({}) as env:
            env.reset(seed)
            assert env.step(env.expert(random.Random(0), 0.0))[1] == 0.0
            assert env.step(env.expert(random.Random(0), 0.0))[1] == 1.0


def test_repositories_can_be_folders_or_archives(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with tarfile.open(tmp_path / "repo.tar.gz", "w:gz") as packed:
        packed.add(folder, ".")
    with zipfile.ZipFile(tmp_path / "repo.zip", "w") as archive:
        for name in FILES:
            archive.write(folder / name, name)
        archive.writestr(".git/packed-refs", "history")
    for place in (folder, tmp_path / "repo.tar.gz", tmp_path / "repo.zip"):
        assert files_of(str(place)) == FILES
    (tmp_path / "empty").mkdir()
    with tarfile.open(tmp_path / "link.tar", "w") as packed:
        link = tarfile.TarInfo("a.py")
        link.type, link.linkname = tarfile.SYMTYPE, "b.py"
        packed.addfile(link)
    wrong = {"none.tar": "cannot be read", "empty": "has no files", "link.tar": "cannot be read.*not found"}
    for place, problem in ((tmp_path / name, problem) for name, problem in wrong.items()):
        with pytest.raises(ValueError, match=problem):
            files_of(str(place))


def test_imports_from_the_repository_stay_in_the_sandboxed_code() -> None:
    source = "import json\nimport calc.core\nfrom calc import core as c\n\ndef test_a():\n    assert json\n"
    imports, rest = split_imports(source, FILES, "x.py")
    assert imports.splitlines() == [
        "import calc.core; import calc as hpcrl_import_0",
        "from calc import core as hpcrl_import_1",
    ]
    assert (
        rest.splitlines()[:3] == ["import json", "calc = hpcrl_import_0", "c = hpcrl_import_1"] and num_tests(rest) == 1
    )
    with pytest.raises(ValueError, match=r"hidden tests x\.py: invalid syntax"):
        split_imports("def", FILES, "x.py")


SHAPES = """
import math
import numpy as np
from math import isclose

class Negative(ValueError):
    def __init__(self, side):
        super().__init__(f"side {side} is negative")
        self.side = side

class TooLong(Negative):
    pass

def mean(numbers):
    return sum(numbers) / len(numbers)

def area(radius):
    if radius < 0:
        raise (TooLong if radius < -9 else Negative)(radius)
    return math.pi * radius ** 2

def lines(path):
    with open(path) as file:
        return file.read().split()

async def later(value):
    return value
"""
SHAPE_FILES = {"shapes/__init__.py": "from .core import area\n", "shapes/core.py": SHAPES}
HIDDEN = {
    "test_functions.py": """
from __future__ import annotations
import pytest
from shapes.core import Negative, isclose, mean, np
import shapes.core as core

@pytest.fixture
def radius():
    return 2.0

@pytest.fixture(params=[1, 2])
def number(request):
    yield request.param

@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x y")
    yield path

def test_fixture(radius):
    assert isclose(core.area(radius), 12.566370614)

def test_library_by_the_module(radius):
    assert core.math.isclose(core.area(radius), 12.566370614) and np.allclose(core.area(1), 3.14159265)

def test_import_inside():
    from shapes import area
    from shapes.core import area as again
    assert area(0) == again(0) == 0

@pytest.mark.parametrize("side", [-1, -2])
def test_own_exception(side):
    with pytest.raises(Negative, match="is negative") as raised:
        core.area(side)
    assert raised.value.side == side and isinstance(raised.value, ValueError)

def test_below_an_own_exception():
    with pytest.raises(Negative):
        core.area(-10)
    with pytest.raises(core.TooLong):
        core.area(-10)

def test_files(file):
    assert core.lines(file) == ["x", "y"] and core.lines(str(file)) == ["x", "y"]

def test_params(number):
    assert mean([number, number]) == number

def test_shared(shared):
    assert shared == [7]

async def test_waiting():
    assert (lambda value: value)(3) == 3

@pytest.mark.skip
def test_skipped():
    assert False

class TestClass:
    @pytest.fixture
    def double(self, radius):
        return 2 * radius

    def setup_method(self):
        self.ready = True

    def test_method(self, double):
        assert double == 4 and self.ready
""",
    "test_unittest.py": """
import unittest
from shapes.core import Negative, mean

class Shapes(unittest.TestCase):
    def setUp(self):
        self.numbers = [1, 2]

    def test_mean(self):
        self.assertEqual(mean(self.numbers), 1.5)

    def test_error(self):
        from shapes.core import area
        with self.assertRaises(Negative):
            area(-1)
""",
    "conftest.py": "import pytest\n\n@pytest.fixture(scope='module')\ndef shared():\n    return [7]\n",
}


@pytest.mark.slow
def test_correct_code_passes_tests_of_all_common_forms() -> None:
    row = {"files": SHAPE_FILES, "hidden_tests": HIDDEN}
    assert problem_of_row(row) == ""
    with episode(row) as env:
        assert env.step("submit")[:2] == ("14 of 14 hidden tests pass.", 1.0)
        for wrong, right in (
            ("** 2", "** 3"),
            ("TooLong if radius < -9 else Negative", "KeyError"),
            ("/ len", "/ 1 + len"),
        ):
            env.reset(0)
            env.step(f"sed -i 's|{wrong.replace('*', chr(92) + '*')}|{right}|' shapes/core.py")
            text, reward, *_ = env.step("submit")
            assert reward == 0.0 and not text.startswith("14"), (wrong, text)


@pytest.mark.slow
def test_the_code_cannot_pass_by_shadowing_libraries_or_by_skipping() -> None:
    """The code's own isclose and np accept everything, and its own Skipped would skip tests."""
    cheats = [
        "isclose = lambda *given, **more: True\n\nclass np:\n    allclose = staticmethod(isclose)\n\n"
        "class math:\n    isclose = isclose\n    pi = 1\n",
        "class Skipped(Exception):\n    __module__ = '_pytest.outcomes'\n\ndef area(radius):\n    raise Skipped\n",
    ]
    with episode({"files": SHAPE_FILES, "hidden_tests": HIDDEN}, partial=True) as env:
        for cheat in cheats:
            env.reset(0)
            env.step(f"cat >> shapes/core.py <<'EOF'\n{cheat}EOF")
            text, reward, *_ = env.step("submit")
            assert reward < 0.9 and text.endswith("of 14 hidden tests pass."), text


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"instance_id": "a__b-1", "base_commit": "12ab", "test_patch": "diff"},
            "column base_commit: rows of SWE-bench",
        ),
        ({"repositry": "a.tar", "hidden_tests": TESTS}, "column repositry: did you mean repository?"),
        ({"hidden_tests": TESTS}, "it has hidden_tests without the columns files or repository"),
        ({"repository": "a.tar", "hidden_test": TESTS}, "column hidden_test: did you mean hidden_tests?"),
        ({}, "it has neither files nor repository"),
        ({"files": FILES}, "it has no hidden_tests"),
        ({"files": FILES, "hidden_tests": {"test_a.py": 1}}, "column hidden_tests must be an object, path -> text"),
        ({"files": FILES, "hidden_tests": {"test_a.py": "def"}}, "hidden_tests: test_a.py: invalid syntax"),
        ({"files": FILES, "hidden_tests": {"test_a.py": "x = 1"}}, "hidden_tests: test_a.py: it has no test"),
        ({"files": FILES, "hidden_tests": {"conftest.py": "x = 1"}}, "hidden_tests has no test file"),
        (
            {"files": FILES, "hidden_tests": {"t.py": "def test_a(monkeypatch):\n    pass"}},
            "hidden_tests: t.py: test_a requests the fixture monkeypatch; available are request, tmp_path",
        ),
        (
            {"files": FILES, "hidden_tests": {"t.py": "from .x import y\ndef test_a():\n    pass"}},
            "hidden_tests: t.py: it has a relative import",
        ),
        ({"env_seed": 3}, ""),
        ({"files": FILES, "hidden_tests": TESTS, "difficulty": 3}, ""),
    ],
)
def test_rows_of_a_different_task_are_refused(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    assert problem_of_row(row).startswith(problem) and bool(problem_of_row(row)) == bool(problem)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": "Repair.", **columns}) + "\n" for columns in ({"env_seed": 1}, row)))
    config = parse({"data": {"train": str(data), "val": None}, "env": {"default": {"name": "swe"}}})
    rows, wrong = read_splits(config.data, config.seed)
    lines = validate_envs(config, rows)
    assert not wrong and len(lines) == bool(problem)
    assert all(line.startswith(f"{data}:2: {problem}") for line in lines), lines


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"files": FILES}, "it has no hidden_tests"),
        (
            {"files": FILES, "repository": "a", "hidden_tests": TESTS},
            "it needs one of the columns files and repository, but has both",
        ),
        ({"files": {"../x.py": ""}, "hidden_tests": TESTS}, "x.py' is outside"),
        ({"files": {".": ""}, "hidden_tests": TESTS}, "'.' is outside"),
        ({"files": {"solution.py": ""}, "hidden_tests": TESTS}, "top-level module solution"),
    ],
)
def test_invalid_rows_are_named(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem), episode(row):
        pass


def test_wrong_options_are_named_before_the_start() -> None:
    config = parse({"env": {"default": {"name": "swe", "options": {"min_level": "L9"}}}})
    (line,) = validate_envs(config, {})
    assert line.startswith("env.default.options: min_level: Input should be 'L0', 'L1', 'L2' or 'L3'")
