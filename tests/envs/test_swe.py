"""Repairing a repository: commands in the sandbox, hidden tests, and what cheats and limits do."""

from __future__ import annotations

import random
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvConfig, parse
from hpcrl.envs.making import make_env, validate_envs
from hpcrl.envs.swe.bugs import SUBJECTS, repair
from hpcrl.envs.swe.repository import files_of, num_tests, split_imports
from tests.contracts import test_env as contract

FILES = {"calc/__init__.py": "", "calc/core.py": "def double(x):\n    return x + 1\n"}
TESTS = {
    "test_a.py": "from calc.core import double\n\ndef test_one():\n    assert double(1) == 2\n\n"
    "def test_two():\n    assert double(3) == 6\n"
}
PLAIN = {"prompt": "{observation}", "turn": "{observation}", "invalid": "{observation}", "tag": ""}
RIGHT = "def double(x):\n    return 2 * x\n"


@contextmanager
def episode(row: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """One that has begun, in the repository of the row."""
    columns = {"files": FILES, "hidden_tests": TESTS} if row is None else row
    env: Any = make_env(EnvConfig(name="swe", options=PLAIN | options), {"prompt": "Double.", "extra": columns})
    try:
        env.first = env.reset(0)[0]
        yield env
    finally:
        env.close()


@pytest.mark.slow
def test_the_contract_of_environments() -> None:
    case = contract.Case("swe", {}, [f"<bash>{word}</bash>" for word in ("ls", "echo x > y; cat y", "false", "submit")])
    first = contract.play(contract.made(case), 5, case.responses)
    assert contract.play(contract.made(case), 5, case.responses) == first
    contract.test_two_episodes_at_once_do_not_know_each_other(case)
    contract.made(case).close()  # type: ignore[attr-defined]  # before its first reset
    for response in ("", "<bash>", "<bash>\0</bash>", "<bash>\ud800</bash>", "<bash>" + "9" * 50_000 + "</bash>"):
        contract.test_what_is_no_action_changes_nothing_and_is_counted(case._replace(responses=[]), response)
    contract.test_a_step_needs_a_running_episode(case)


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
def test_no_test_is_to_be_found_and_no_cheat_passes() -> None:
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
def test_limits_hold_and_the_folder_stays() -> None:
    with episode(command_timeout_s=1.0, output_chars=100, max_output_kib=64) as env:
        env.step("echo kept > file; (sleep 1000; echo late > file) & disown")
        assert "stopped by the limit of time" in env.step("sleep 30")[0]
        text = env.step("cat file; seq 1 200")[0]
        assert text.startswith("kept") and "characters left out]" in text and text.endswith("200")
        assert "limit of output" in env.step("yes")[0]
        assert env.step("cat file; pgrep -c sleep; cat /etc/shadow")[0].startswith("kept")
        refused = env.step("python -c 'import socket; socket.create_connection((\"127.0.0.1\", 1))'")[0]
        assert "Refused" not in refused and "exit code 1" in refused and env.step("cat file")[0] == "kept"


def test_every_generated_bug_fails_a_test_and_its_repair_none() -> None:
    """In this process, as these repositories are ours."""

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


def test_repositories_are_folders_and_archives(tmp_path: Path) -> None:
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


def test_imports_of_the_repository_are_the_codes() -> None:
    source = "import json\nimport calc.core\nfrom calc import core as c\n\ndef test_a():\n    assert json\n"
    imports, rest = split_imports(source, {"calc", "README.md"}, "x.py")
    assert imports == "import calc.core\nfrom calc import core as c" and "calc" not in rest and num_tests(rest) == 1
    with pytest.raises(ValueError, match=r"hidden tests x\.py: invalid syntax"):
        split_imports("def", set(), "x.py")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"files": FILES}, "the column hidden_tests"),
        ({"files": FILES, "repository": "a", "hidden_tests": TESTS}, "one of the columns files and repository"),
        ({"files": {"../x.py": ""}, "hidden_tests": TESTS}, "x.py' is outside"),
        ({"files": {".": ""}, "hidden_tests": TESTS}, "'.' is outside"),
        ({"files": {"solution.py": ""}, "hidden_tests": TESTS}, "top-level module solution"),
    ],
)
def test_wrong_rows_are_named(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem), episode(row):
        pass


def test_wrong_options_are_named_before_the_start() -> None:
    config = parse({"env": {"default": {"name": "swe", "options": {"min_level": "L9"}}}})
    (line,) = validate_envs(config, {})
    assert line.startswith("env.default.options: min_level: Input should be 'L0', 'L1', 'L2' or 'L3'")
