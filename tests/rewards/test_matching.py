"""Multiple choice, numbers, shared words, patterns and JSON schemas."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hpcrl.config import RewardConfig
from hpcrl.rewards.builtin.choice import letter_of
from hpcrl.rewards.builtin.f1 import f1
from hpcrl.rewards.builtin.numeric import last_number
from hpcrl.rewards.reward import RewardItem, Score, make_reward


def score(name: str, response: str, answer: Any = None, **options: Any) -> Score:
    reward = make_reward(RewardConfig(name=name, options=options))
    (scored,) = reward.score([RewardItem(0, "d", "p", response, answer)])  # type: ignore[misc]
    return scored


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *[
            (text, "B")
            for text in ("B", "(B)", "B.", "B. Paris", "B) Paris", "[B]", "**B**", "$B$", r"\text{B}", "B: x")
        ],
        *[(text, "B") for text in ("option B", "B, Paris", "B - Paris", "(b)", r"\mathrm{B}", "B because it is so")],
        *[(text, None) for text in ("Because", "b", "", "12", "BC", "the B", "A man")],
    ],
)
def test_option_letters_are_extracted(text: str, letter: str | None) -> None:
    assert letter_of(text) == letter


@pytest.mark.parametrize(
    ("response", "reward", "soft"),
    [
        (r"So \boxed{B}.", 1.0, 1.0),
        ("The answer is (B).", 1.0, 0.5),
        ("Answer: B", 1.0, 0.5),
        (r"\boxed{C}", 0.0, -0.5),
        ("The answer is C.", 0.0, -1.0),
        ("I do not know", 0.0, -1.0),
        (r"<think>\boxed{B}</think>The answer is C", 0.0, -1.0),
        ("", 0.0, -1.0),
    ],
)
def test_multiple_choice_answers_are_scored(response: str, reward: float, soft: float) -> None:
    plain, graded = score("choice", response, "B"), score("choice", response, "(B)", soft=True)
    assert (plain.reward, graded.reward) == (reward, soft) and plain.score == graded.score == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18),
        ("$1,234.50 and no more", 1234.5),
        ("-3.5e2", -350),
        ("from 2 to 7", 7),
        (".5", 0.5),
        ("1,23", 23),
        ("none", None),
        ("1e999", None),
        ("Route e5", 5),
        ("mode3", 3),
        ("\u22125", -5),
        ("10-5", 5),
        ("2/4", None),
        (r"\frac{1}{2}", None),
        ("", None),
        ("- .", None),
    ],
)
def test_the_last_number_is_extracted(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_numeric_answers_are_scored() -> None:
    assert score("numeric", "The answer is 18.", "6 + 12 = 18\n#### 18").reward == 1.0
    assert score("numeric", "The answer is 18.1", "18").reward == 0.0
    assert score("numeric", "The answer is 18.1", "18", relative=0.01).reward == 1.0
    assert score("numeric", "The answer is 18.1", 18, absolute=0.2).reward == 1.0
    assert score("numeric", "no idea", 18).metrics == {"no_answer": 1.0}
    assert "has no number" in make_reward(RewardConfig(name="numeric")).problem_of_row("many", {})


@pytest.mark.parametrize(
    ("given", "gold", "value"),
    [
        ("the Eiffel Tower", "Eiffel tower!", 1.0),
        ("Eiffel", "Eiffel Tower", 2 / 3),
        ("a b b", "b b c d", 2 * 2 / 6),  # "a" is an article
        ("Paris", "Rome", 0.0),
        ("the", "", 1.0),
        ("x", "the", 0.0),
    ],
)
def test_shared_words_are_scored_by_f1(given: str, gold: str, value: float) -> None:
    assert f1(given, gold) == pytest.approx(value)


def test_f1_takes_the_best_of_several_answers() -> None:
    best = score("f1", "The answer is Eiffel", ["Louvre", "Eiffel Tower"])
    assert (best.reward, best.score) == (pytest.approx(2 / 3), 0.0)
    assert score("f1", "Eiffel", "Eiffel Tower", threshold=0.6).score == 1.0


def test_responses_are_matched_by_a_pattern() -> None:
    assert score("regex", "<think>\\boxed</think>It is \\boxed{4}.", r"\\boxed\{\d\}").reward == 1.0
    assert score("regex", "<think>A1</think>none", "A1").reward == 0.0
    assert score("regex", "<think>A1</think>none", "A1", with_thinking=True).reward == 1.0
    assert score("regex", "xA1", pattern="A1").reward == 1.0
    assert score("regex", "xA1", pattern="A1", whole=True).reward == 0.0
    assert not make_reward(RewardConfig(name="regex")).inline  # a pattern may backtrack without end
    assert "is not a regular expression" in make_reward(RewardConfig(name="regex")).problem_of_row("(", {})
    assert "no answer" in make_reward(RewardConfig(name="regex")).problem_of_row(None, {})
    with pytest.raises(ValueError, match="not a regular expression"):
        make_reward(RewardConfig(name="regex", options={"pattern": "("}))


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("response", "reward", "is_json"),
    [
        ('{"age": 3}', 1.0, 1.0),
        ('Here:\n```json\n{"age": 3}\n```', 1.0, 1.0),
        ('```\n{}\n```\nno:\n```json\n{"age": 3}\n```', 1.0, 1.0),
        ('{"age": "3"}', 0.0, 1.0),
        ("{}", 0.0, 1.0),
        ("age: 3", 0.0, 0.0),
        ('{"age": 3, "more": NaN}', 0.0, 0.0),
        ('```python\nx = 1\n```\n```json\n{"age": 3}\n```', 1.0, 1.0),
        ('```json\n{"age": 3, "text": "```"}\n```', 1.0, 1.0),
        ("[" * 100_000, 0.0, 0.0),
    ],
)
def test_responses_are_checked_against_a_json_schema(response: str, reward: float, is_json: float) -> None:
    for scored in (score("json_schema", response, SCHEMA), score("json_schema", response, json_schema=SCHEMA)):
        assert (scored.reward, scored.metrics) == (reward, {"is_json": is_json})


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("text", "is not a JSON schema"),
        ({"type": "thing"}, "not a JSON schema: 'thing' is not valid"),
        ({"$ref": "http://localhost/secret"}, "refers to 'http://localhost/secret'"),
        ({"properties": {"a": {"allOf": [{"$ref": "file.json"}]}}}, "refers to 'file.json'"),
        ({"$ref": "#/$defs/none"}, "refers to '#/$defs/none', which does not exist in it"),
    ],
)
def test_schemas_are_checked_before_the_start(schema: Any, told: str) -> None:
    assert told in make_reward(RewardConfig(name="json_schema")).problem_of_row(schema, {})
    if isinstance(schema, dict):
        with pytest.raises(ValueError, match="json_schema: "):
            make_reward(RewardConfig(name="json_schema", options={"json_schema": schema}))
    assert make_reward(RewardConfig(name="json_schema")).problem_of_row(SCHEMA, {}) == ""


def test_a_response_too_deeply_nested_for_a_recursive_schema_is_wrong() -> None:
    schema = {"$ref": "#/$defs/list", "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}}
    assert score("json_schema", "[[]]", schema).reward == 1.0
    assert score("json_schema", "[" * 500 + "]" * 500, schema).reward == 0.0


@pytest.mark.slow
def test_an_endless_search_is_an_error_within_its_time_limit() -> None:
    start = time.monotonic()
    (result,) = make_reward(RewardConfig(name="regex")).score([RewardItem(0, "d", "p", "a" * 2000, "(.*a){20}b")])
    assert result.score == 0 and result.error == "TimeoutError: the search took more than 2 s"
    assert score("regex", "x" * 40 + "z y", "(x+x+)+y") == Score(0.0, 0.0, ground_truth="(x+x+)+y"), (
        "Python's re needs hours"
    )
    assert time.monotonic() - start < 20
