"""The command that tests a reward."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.commands.score import main

FUNCTIONS = Path(__file__).parent / "rewards" / "user_rewards.py"


def test_one_response_is_scored_and_the_extracted_answer_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--reward", "math", "--answer", "so 9*2\n#### 18", "The answer is **18**."]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "reward       1, score 1",
        "extracted    18",
        "ground truth 18",
    ]
    assert main(["--answer", "18", "--options", "require_boxed=true", "It is 18."]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "reward       0, score 0", "extracted    nothing", "ground truth 18", "metrics      no_answer 1",
    ]  # fmt: skip


def test_a_file_of_rows_is_scored_with_its_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"response": r"\boxed{2}", "answer": 2}, {"response": "3", "answer": "2", "level": 1}, {"response": "1"}]
    (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert main(["--file", f"{tmp_path}/rows.jsonl"]) == 1, "one has no answer to compare with"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}/rows.jsonl:1" and lines[4] == f"{tmp_path}/rows.jsonl:3"
    assert "error        ValueError: the row has no answer to compare with (data.answer_key)" in lines
    assert lines[-1] == "3 responses: mean reward 0.3333, mean score 0.3333, 1 errors"
    assert main(["--file", f"{tmp_path}/rows.jsonl", "--json"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["score"] for each in found] == [1.0, 0.0, 0.0] and found[0]["extracted"] == "2"


def test_functions_get_options_columns_and_group_members(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--reward", f"{FUNCTIONS}:trl", "--options", "bonus=0.5", "--column", "level=2", "xx", "yyy"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "score" in line] == [
        "reward       4.5, score 4.5", "reward       5.5, score 5.5",
        "2 responses: mean reward 5, mean score 5, 0 errors",
    ]  # fmt: skip
    assert main(["--reward", "tests.rewards.user_rewards:longest", "a", "bbb", "cc"]) == 0
    assert "mean reward 0.3333" in capsys.readouterr().out


def test_the_turns_of_an_episode_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "from hpcrl.rewards.reward import Score\n"
        "def f(items):\n"
        "    return [Score(1.5, 1, turn_rewards=[len(turn.text) / 2 for turn in item.turns]) for item in items]\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"response": ["a", "bb"]}\n{"response": "ccc"}\n{"response": ["a"]}\n')
    assert main(["--reward", f"{tmp_path}/mine.py:f", "--file", f"{tmp_path}/rows.jsonl"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["reward       1.5, score 1", "turns        0.5, 1"] and "turns        1.5" in lines
    assert "error        the turn_rewards add up to 0.5, but the reward is 1.5" in lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reward", "mathz", "x"], "--reward mathz: there are exact_match, math, "),
        (["--options", "requireboxed=1", "x"], "there is no option 'requireboxed' (there are: require_boxed, "),
        (["--options", "bonus", "x"], "--options bonus: expected KEY=VALUE"),
        (["--reward", "nowhere.py:f", "x"], "nowhere.py:f: no such file"),
        (["--signature", "ppo", "x"], "--signature ppo: Input should be 'auto', 'verl'"),
        ([], "give a response, or --file with rows"),
        (["x"], "give --answer, which the reward math compares with"),
        (["--file", "open.jsonl"], 'open.jsonl: no row has an "answer", which the reward math compares with'),
        (["--file", "open.jsonl", "--answer", "3"], "--file excludes a response, --answer, "),
        (["--answer", "3", "\udcff"], "a response, the prompt or the answer is not UTF-8 text"),
        (["--reward", f"{'x' * 300}.py:f", "x"], "x.py:f: File name too long"),
        (["--reward", "~nobody-has-this-name/f.py:f", "x"], "f.py:f: Could not determine home directory"),
        (["--reward", "leaves.py:f", "x"], "leaves.py:f: running the file failed: SystemExit: 0"),
        (["--file", "x" * 300], "x: File name too long"),
        (["--file", "nowhere.jsonl"], "--file nowhere.jsonl: No such file or directory"),
        (["--file", "bad.jsonl"], 'bad.jsonl:2: expected an object with a text "response", there is: respons'),
        (["--file", "broken.jsonl"], "broken.jsonl:1: not JSON: "),
        (["--file", "empty.jsonl"], "empty.jsonl: no rows"),
        (["--file", "half.jsonl"], "half.jsonl:2: a text has a lone surrogate: '\\ud800'"),
        (["--file", "half.jsonl", "--json"], "half.jsonl:2: a text has a lone surrogate: '\\ud800'"),
        (["--file", "deep.jsonl"], "deep.jsonl:1: maximum recursion depth exceeded"),
        (["--answer", "3", "--column", f"level={'[' * 100_000}", "x"], "--column level: maximum recursion depth"),
        (["--answer", "3", "--column", f"level={'9' * 5000}", "x"], "--column level: Exceeds the limit (4300 digits)"),
        (["--file", "latin.jsonl"], "latin.jsonl: not UTF-8 text"),
        (["--whatever", "x"], "unrecognized arguments: --whatever"),
    ],
)
def test_bad_input_is_reported_in_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"response": "a"}\n{"respons": "a"}\n')
    Path("broken.jsonl").write_text('{"response": "a"\n')
    Path("empty.jsonl").write_text("\n")
    Path("open.jsonl").write_text('{"response": "a"}\n')
    Path("leaves.py").write_text("raise SystemExit(0)\n")
    Path("half.jsonl").write_text('{"response": "a", "answer": "3"}\n{"response": "a", "answer": "\\ud800"}\n')
    Path("deep.jsonl").write_text(f'{{"response": "a", "level": {"[" * 100_000}{"]" * 100_000}}}\n')
    Path("latin.jsonl").write_bytes(b'{"response": "\xe4"}\n')
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith("hpcrl score: ") and message in told.err and "--help" in told.err


def test_an_extracted_answer_can_be_any_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "from hpcrl.rewards.reward import Score\n"
        "def f(items):\n"
        "    return [Score(1, 1, error='half \\ud800', extracted=18, ground_truth={2}) for item in items]\n"
    )
    words = ["--reward", f"{tmp_path}/mine.py:f", "x"]
    assert main(words) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "error        half ?",
        "extracted    18",
        "ground truth {2}",
    ]
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["error"], found["extracted"], found["ground_truth"]) == ("half ?", "18", "{2}")


def test_a_closed_pipe_ends_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["--answer", "3", "3", "4"]) == 0
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_standard_input_must_be_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for written, code in ((b"It is 3.", 0), (b"\xff", 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(written), errors="surrogateescape"))
        assert main(["--answer", "3", "-"]) == code
    assert "not UTF-8 text" in capsys.readouterr().err


def test_the_module_runs_and_imports_no_torch() -> None:
    code = "import sys; from hpcrl.commands.score import main\n"
    code += "code = main(); print('torch' in sys.modules); sys.exit(code)"
    words = ["--reward", "math", "--answer", "1/2", r"\boxed{\frac{1}{2}}"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("\nFalse\n")
