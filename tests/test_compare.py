"""hpcrl compare: joins by prompt and row, figures by hand, errors, and hostile texts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrl.commands.compare import main
from hpcrl.system.exit_codes import ExitCode

Scores = Mapping[str, Sequence[Sequence[float]]]


def line(set_: str, number: int, sample: int, score: float, **other: Any) -> dict[str, Any]:
    """A response as a run writes it."""
    content = {
        "set": set_,
        "prompt_id": f"{number:016x}",
        "sample": sample,
        "greedy": False,
        "prompt": [{"role": "user", "content": f"{set_} {number}?"}],
        "response": f"It is {score:g}.",
        "score": score,
        "rewards": {set_: score},
        "answer": "1",
        "tokens": 4,
        "truncated": False,
        "error": None,
        "tags": [],
        "row": number,
    }
    return content | other


def header(**other: Any) -> dict[str, Any]:
    return {"format": 1, "model": "tiny", "step": 0, "sets": {}} | other


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def scored(path: Path, scores: Scores, first: int = 0, **head: Any) -> str:
    """A file with these scores of the prompts of each set, whose numbers begin with `first`."""
    rows = [
        line(name, number, sample, score)
        for name, prompts in scores.items()
        for number, samples in enumerate(prompts, first)
        for sample, score in enumerate(samples)
    ]
    return write(path, header(**head), *rows)


def compare(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == ExitCode.DONE
    said = capsys.readouterr()
    assert not said.err and said.out.count("\n") == 1
    found: dict[str, Any] = json.loads(said.out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == ExitCode.BAD_INPUT
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    return said.err.removeprefix("hpcrl compare: ").rstrip("\n")


def test_common_prompts_are_compared_and_others_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = scored(tmp_path / "a.jsonl", {"maths": [[1], [0], [0], [1]], "old": [[1]]})
    b = scored(tmp_path / "b.jsonl", {"maths": [[0], [1], [1], [1]], "new": [[1], [1]]}, first=1)
    found = compare(capsys, a, b)
    maths = found["sets"]["maths"]  # common: prompts 1, 2, 3 with 0, 0, 1 in A and 0, 1, 1 in B
    assert (maths["prompts"], maths["only_a"], maths["only_b"]) == (3, 1, 1)
    assert (maths["mean_a"], maths["mean_b"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert (maths["lost"], maths["gained"], maths["mcnemar_p"]) == (0, 1, 1.0)
    assert maths["difference"] == pytest.approx(1 / 3) and maths["stderr"] == pytest.approx(1 / 3)
    assert maths["interval"] == [0, 1]  # Binomial(3, 1/3): P(0) = .296, P(3) = .037
    assert found["sets_only_in"] == {"a": {"old": 1}, "b": {"new": 2}} and list(found["sets"]) == ["maths"]
    assert found["overall"] == maths


def test_sets_are_compared_each_and_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = scored(tmp_path / "a.jsonl", {"one": [[1], [1]], "two": [[0]]})
    b = scored(tmp_path / "b.jsonl", {"one": [[1], [0]], "two": [[1]]})
    found = compare(capsys, a, b)
    assert [found["sets"][name]["difference"] for name in ("one", "two")] == [-0.5, 1.0]
    assert (found["overall"]["prompts"], found["overall"]["difference"]) == (3, 0.0)
    assert found["sets"]["two"]["interval"] is None
    assert main([a, b]) == ExitCode.DONE
    table = [line.split() for line in capsys.readouterr().out.splitlines()[3:7]]
    assert table[0][:5] == ["set", "prompts", "only", "A", "only"]
    assert table[1][:7] == ["one", "2", "0", "0", "1.0000", "0.5000", "-0.5000"]
    assert table[2][0:7] + table[2][7:9] == ["two", "1", "0", "0", "0.0000", "1.0000", "+1.0000", "-", "-"]
    assert table[3][:2] == ["all", "3"]
    only = compare(capsys, a, b, "--set", "two")
    assert list(only["sets"]) == ["two"] and only["overall"]["prompts"] == 1


def test_several_responses_to_a_prompt_are_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = scored(tmp_path / "a.jsonl", {"s": [[1, 0, 0, 0], [1, 1, 0, 0]]})
    b = scored(tmp_path / "b.jsonl", {"s": [[1, 1, 1, 1], [0, 0]]})
    found = compare(capsys, a, b)["sets"]["s"]
    assert (found["mean_a"], found["mean_b"], found["difference"]) == (0.375, 0.5, 0.125)
    assert (found["lost"], found["gained"], found["mcnemar_p"]) == (1, 1, None)
    assert (found["responses_a"], found["responses_b"]) == ([4, 4], [2, 4])
    assert main([a, b]) == ExitCode.DONE
    assert "s: 2 to 4 responses of B to each prompt" in capsys.readouterr().out


def test_a_run_is_its_newest_validation_or_that_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "a"
    for step, score in ((0, 0), (20, 0.5), (1_000_000, 1)):
        scored(run / "validation" / f"step_{step:06d}.jsonl", {"s": [[score]]}, step=step)
    (run / "validation" / ".step_000021.jsonl.tmp").write_text("half")
    found = compare(capsys, f"{run}@0", str(run))
    assert (found["a"]["step"], found["b"]["step"], found["overall"]["difference"]) == (0, 1_000_000, 1.0)
    assert compare(capsys, f"{run}@20", f"{run}@20")["overall"]["difference"] == 0, "the same file twice"
    assert "no validation of step 7; there are steps 0, 20, 1000000" in refused(capsys, f"{run}@7", str(run))
    assert "expected RUN@STEP" in refused(capsys, f"{run}@last", str(run))
    (run / "config.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert compare(capsys, "a@0", "a@20")["overall"]["difference"] == 0.5, "a name in runs/"


def test_a_path_may_have_an_at_sign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "a@3"
    scored(run / "validation" / "step_000000.jsonl", {"s": [[1]]})
    assert compare(capsys, str(run), f"{run}@0")["overall"]["prompts"] == 1
    file = run / "validation" / "step_000000.jsonl"
    assert "is a file" in refused(capsys, f"{file}@0", str(run))


def test_unusable_sides_are_one_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = scored(tmp_path / "good.jsonl", {"s": [[1]]})
    (tmp_path / "run").mkdir()
    assert "no validation/step_NNNNNN.jsonl" in refused(capsys, good, str(tmp_path / "run"))
    assert "no such file, run folder or run in runs/" in refused(capsys, good, str(tmp_path / "absent"))
    assert "the file is empty" in refused(capsys, good, write(tmp_path / "empty.jsonl"))
    assert "no responses" in refused(capsys, good, write(tmp_path / "head.jsonl", header()))
    assert "2.jsonl:1: format 2, but" in refused(capsys, good, write(tmp_path / "2.jsonl", header(format=2)))
    assert "not the header" in refused(capsys, good, write(tmp_path / "no.jsonl", {"prompt": "p"}))
    bad = write(
        tmp_path / "bad.jsonl", header(), {"set": "s", "prompt_id": "0", "score": "1", "row": 0}, line("s", 1, 0, 1)
    )
    assert "bad.jsonl:2: not a scored response" in refused(capsys, good, bad)
    for score in ("1e999", "NaN", "null"):
        row = json.dumps(line("s", 0, 0, 1)).replace('"score": 1,', f'"score": {score},')
        (tmp_path / "bad.jsonl").write_text(json.dumps(header()) + "\n" + row + "\n")
        assert "bad.jsonl:2: not a scored response" in refused(capsys, good, bad), score
    (tmp_path / "bad.jsonl").write_text("[" * 100_000 + "\n")
    assert "bad.jsonl:1: not the header" in refused(capsys, good, bad)
    assert "--metric f1" in refused(capsys, good, good, "--metric", "f1")
    assert "--show -1" in refused(capsys, good, good, "--show", "-1")


def test_no_common_prompts_have_a_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = scored(tmp_path / "a.jsonl", {"gsm8k": [[1], [0]]})
    b = scored(tmp_path / "b.jsonl", {"default": [[1], [1]]})
    assert f"no common set: A ({a}) has gsm8k (2 prompts); B ({b}) has default (2 prompts)" in refused(capsys, a, b)
    assert "A (" in (said := refused(capsys, a, b, "--set", "aime")) and "has no set aime; it has gsm8k" in said
    found = compare(capsys, a, b, "--set", "gsm8k=default")
    assert found["sets"]["gsm8k = default"]["difference"] == 0.5 and found["sets_only_in"] == {"a": {}, "b": {}}
    other = [line("gsm8k", n, 0, 1, prompt_id=f"{n + 100:016x}") for n in range(2)]
    c = write(tmp_path / "c.jsonl", header(), *other)
    assert "another prompt template; --by row" in refused(capsys, a, c)
    assert compare(capsys, a, c, "--by", "row")["overall"]["difference"] == 0.5
    d = write(tmp_path / "d.jsonl", header(), line("gsm8k", 9, 0, 1))
    assert "no common row" in refused(capsys, a, d, "--by", "row")


def test_a_torn_last_line_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = scored(tmp_path / "a.jsonl", {"s": [[1], [0]]})
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(Path(a).read_bytes()[:-40])
    found = compare(capsys, a, str(torn))
    assert found["overall"]["prompts"] == 1 and found["notes"] == [
        f"{torn}: the last line is incomplete and was left out"
    ]
    torn.write_bytes(Path(a).read_bytes()[:-1])  # only the line break is missing
    assert compare(capsys, a, str(torn))["overall"]["prompts"] == 2


def test_half_characters_are_read_and_scores_that_are_none_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = scored(tmp_path / "a.jsonl", {"s": [[1], [0]]})
    rows = [line("s", number, 0, 1, error=f"no file {chr(0xD800)}") for number in range(2)]
    found = compare(capsys, a, write(tmp_path / "b.jsonl", header(), *rows))
    assert found["overall"]["difference"] == 0.5
    for score in (math.nan, math.inf, None, "1"):
        bad = write(tmp_path / "bad.jsonl", header(), {**rows[0], "score": score})
        assert refused(capsys, a, bad).startswith(f"{bad}:2: not a scored response: ")


def test_different_settings_and_errors_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = scored(tmp_path / "a.jsonl", {"s": [[1]]}, sets={"s": {"temperature": 0.0, "samples": 1}})
    head = header(sets={"s": {"temperature": 0.6, "samples": 1}})
    b = write(tmp_path / "b.jsonl", head, line("s", 0, 0, 0, error="timeout"))
    assert compare(capsys, a, b)["notes"] == [
        "s: temperature is 0.0 in A and 0.6 in B",
        "responses of B whose reward failed: 1; they count with their score",
    ]


def test_the_prompts_that_changed_most_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = scored(tmp_path / "a.jsonl", {"s": [[0.5], [1], [1]]})
    long = "begin " + "x" * 5000 + " end"
    rows = [
        line("s", 0, 0, 0.75),
        line("s", 1, 0, 1),
        line("s", 2, 0, 0, response=[{"role": "assistant", "content": long}]),
    ]
    b = write(tmp_path / "b.jsonl", header(), *rows)
    shown = compare(capsys, a, b, "--show", "5")["shown"]
    assert [(each["prompt"], each["score"]) for each in shown] == [
        (f"{2:016x}", {"a": 1, "b": 0}),
        (f"{0:016x}", {"a": 0.5, "b": 0.75}),
    ], "prompt 1 did not change"
    assert shown[0]["a"] == {"prompt": "user: s 2?", "response": "It is 1.", "answer": "1", "gold": ""}
    assert shown[0]["b"]["response"] == f"assistant: {long}"
    assert main([a, b, "--show", "1"]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert (
        "-- 1. s, prompt 0000000000000002: A 1, B 0\n[prompt]\nuser: s 2?\n[A]\nIt is 1.\n[answer of A]\n1\n[B]\n"
        in text
    )
    assert "assistant: begin xxx" in text and " characters ...]" in text and "-- 2." not in text


def test_texts_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07 \x9b2J\r\u202egnp\nnext\tcell 数"
    name = "s\x1b[2J\n"
    a = write(tmp_path / "a.jsonl", header(model="m\x1b[1m\nB fake"), line(name, 0, 0, 1, response=evil))
    b = write(tmp_path / "b.jsonl", header(), line(name, 0, 0, 0))
    assert main([a, b, "--show", "1"]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert all(sign.isprintable() or sign in "\n\t" for sign in text)
    assert "\\x1b]0;owned\\x07 \\x9b2J\\r\\u202egnp\nnext\tcell 数" in text
    assert "(m\\x1b[1m\\nB fake, step 0)" in text and "s\\x1b[2J\\n" in text
