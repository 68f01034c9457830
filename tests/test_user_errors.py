"""Errors of samples on the console, in the run folder and in `hpcrl status`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.commands import status
from hpcrl.run_folder import user_errors
from hpcrl.run_folder.user_errors import ERRORS, OTHERS, UserErrors, read_errors

pytestmark = pytest.mark.usefixtures("console")


def test_only_the_first_error_of_each_kind_is_printed_and_all_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.txt").touch()  # a run folder
    errors = UserErrors(tmp_path)
    for number in range(12):
        errors.report("environment", "maze", f"environment class: KeyError: {number} (maze.py:7)")
    first, tenth = capsys.readouterr().out.splitlines()
    assert first.startswith("hpcrl: environment of domain maze: environment class: KeyError: 0 (maze.py:7)")
    assert tenth.startswith("hpcrl: 10 samples had errors so far")
    errors.report("environment", "maze", "environment class: KeyError: 0 (maze.py:8)")
    errors.report("reward", "maths", "ValueError: no (judge.py:3)")
    other_line, reward = capsys.readouterr().out.splitlines()
    assert "maze.py:8" in other_line and reward.startswith("hpcrl: reward of domain maths: ValueError: no (judge.py:3)")
    errors.write()
    kinds = read_errors(tmp_path)
    assert [(kind["domain"], kind["count"]) for kind in kinds] == [("maze", 12), ("maze", 1), ("maths", 1)]
    shown = status.describe(tmp_path, None, 0.0)
    assert "12 samples with an error, the last 20" in shown and "maze.py:7" in shown and "judge.py:3" in shown


def test_a_new_attempt_continues_counting_and_prints_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        errors = UserErrors(tmp_path)
        errors.report("reward", "maths", "ValueError: no (judge.py:3)")
        errors.write()
        assert "judge.py:3" in capsys.readouterr().out
    assert [kind["count"] for kind in read_errors(tmp_path)] == [2]


def test_many_kinds_of_errors_fill_neither_console_nor_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = UserErrors(tmp_path)
    for number in range(200):
        errors.report("reward", "maths", "E" * (number + 1))
    errors.write()
    kinds = read_errors(tmp_path)
    assert len(kinds) == user_errors.MAX_KINDS + 1 and kinds[-1]["error"] == OTHERS and kinds[-1]["count"] == 150
    assert len(capsys.readouterr().out.splitlines()) == user_errors.PRINTED_KINDS + 1  # and after 100 errors in all


@pytest.mark.parametrize(
    ("happens", "hopeless"),
    [
        (["a1"] * 32, True),
        (["a1", "a22"] * 16, True),  # a kind's errors differ in numbers
        (["a1"] * 31, False),
        (["a1"] * 31 + ["b1"] + ["a1"] * 64, False),
        (["", *["a1"] * 100], False),
        (["a1"] * 31 + [""] + ["a1"] * 64, False),
    ],
)
def test_an_attempt_is_hopeless_if_its_first_samples_fail_alike(happens: list[str], hopeless: bool) -> None:
    errors = UserErrors(None)
    for error in happens:
        if error:
            errors.report("reward", "maths", f"ValueError: {error} (judge.py:3)")
        else:
            errors.succeeded()
    said = errors.hopeless()
    assert bool(said) == hopeless
    if said:
        assert said.startswith("ValueError: a1 (judge.py:3): the reward of domain maths failed so")
        assert said.endswith("each of the first 32 samples")


def test_a_full_disk_loses_only_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = UserErrors(tmp_path / "gone")
    errors.report("reward", "maths", "ValueError: no")
    assert "errors.json cannot be written" in capsys.readouterr().out and not (tmp_path / "gone" / ERRORS).exists()


def test_unprintable_characters_are_replaced_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    UserErrors(None).report("reward", "maths", "a\n\x1b[2Jb " + 9000 * "c")
    (line,) = capsys.readouterr().out.splitlines()
    assert "a ?[2Jb ccc" in line and len(line) < 1000


@pytest.mark.parametrize("text", ["{", '{"errors": [1]}', '{"errors": [{"source": "reward"}]}'])
def test_a_damaged_file_loses_only_the_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / ERRORS).write_text(text)
    UserErrors(tmp_path).report("reward", "maths", "ValueError: no")
    assert "errors.json cannot be read" in capsys.readouterr().out
    assert [kind["count"] for kind in read_errors(tmp_path)] == [1]
