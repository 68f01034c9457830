"""Rows of published benchmark files, as rows of hpcrl: `question` for the template, and what the reward reads."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

LETTERS = "ABCD"


def maths(raw: Mapping[str, Any]) -> dict[str, Any]:
    """GSM8K (question, answer), MATH-500 (problem, answer, subject, level), AIME (problem, and answer or a solution in
    a box; also with capitals, as Maxwell-Jia/AIME_2024 has them)."""
    level = raw.get("level")
    tags = [raw.get("subject"), None if level is None else f"level {level}"]
    answer = _column(raw, "answer", "Answer", "solution", "Solution")
    return {
        "question": _text(raw, "question", "problem", "Problem"),
        "answer": answer if isinstance(answer, str) else str(answer),
        "tags": [str(tag) for tag in tags if tag is not None],
    }


def humaneval(raw: Mapping[str, Any]) -> dict[str, Any]:
    """HumanEval: prompt, test, entry_point. A response may be the whole function, or continue the prompt."""
    prompt = _text(raw, "prompt")
    tests = {name: _text(raw, name) for name in ("test", "entry_point")}
    return {"question": prompt.rstrip(), "setup": prompt, "task_id": raw.get("task_id"), **tests}


def mbpp(raw: Mapping[str, Any]) -> dict[str, Any]:
    """MBPP: prompt (sanitized) or text (full), and test_list, with test_imports or test_setup_code."""
    tests = _column(raw, "test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"test_list={str(tests)[:40]!r} is not a list of code")
    given = {name: raw[name] for name in ("test_imports", "test_setup_code") if raw.get(name)}
    question = "\n".join([_text(raw, "prompt", "text").strip(), "Your code should pass these tests:", *tests])
    return {"question": question, "test_list": tests, "task_id": raw.get("task_id"), **given}


def ifeval(raw: Mapping[str, Any]) -> dict[str, Any]:
    """IFEval: prompt, instruction_id_list, kwargs; arguments that are null do not exist."""
    names, arguments = _column(raw, "instruction_id_list"), _column(raw, "kwargs")
    own = [{key: value for key, value in (each or {}).items() if value is not None} for each in arguments]
    families = dict.fromkeys(str(name).partition(":")[0] for name in names)
    return {"question": _text(raw, "prompt"), "instruction_id_list": names, "kwargs": own, "tags": [*families]}


def gpqa(raw: Mapping[str, Any]) -> dict[str, Any]:
    """GPQA: Question, Correct Answer, Incorrect Answer 1 to 3. The question alone decides the order of the choices, so
    all runs have the same."""
    question = _text(raw, "Question").strip()
    right = _text(raw, "Correct Answer").strip()
    choices = [right, *(_text(raw, f"Incorrect Answer {number}").strip() for number in (1, 2, 3))]
    random.Random(hashlib.sha256(question.encode()).hexdigest()).shuffle(choices)
    lines = [f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    tags = [str(raw[name]) for name in ("High-level domain", "Subdomain") if raw.get(name)]
    return {"question": "\n".join([question, "", *lines]), "answer": LETTERS[choices.index(right)], "tags": tags}


def _column(raw: Mapping[str, Any], *names: str) -> Any:
    """The first of these columns that the row has. ValueError if it has none."""
    found = next((raw[name] for name in names if raw.get(name) is not None), None)
    if found is None:
        raise ValueError(f"no column {' or '.join(names)}; the row has {', '.join(map(str, raw)) or 'no keys'}")
    return found


def _text(raw: Mapping[str, Any], *names: str) -> str:
    found = _column(raw, *names)
    if not isinstance(found, str):
        raise ValueError(f"{' or '.join(names)} is {type(found).__name__}, not text")
    return found
