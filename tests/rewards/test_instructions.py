"""IFEval's instructions, each with one text that follows it and several that do not; and the reward made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import RewardConfig
from hpcrl.rewards.builtin.instructions import INSTRUCTIONS, count_sentences, follows, loose_variants, problem
from hpcrl.rewards.reward import RewardItem, Score, make_reward

DATA = Path(__file__).parents[3] / "shared" / "data" / "ifeval" / "input_data.jsonl"
FRENCH = "Le chat dort sur la chaise et le chien joue dans le jardin avec les enfants."

CASES: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("keywords:existence", {"keywords": ["sun", "Moon"]}, "The SUN and the moonlight.", ["Only the sun.", "nothing"]),
    (
        "keywords:frequency",
        {"keyword": "tea", "frequency": 2, "relation": "at least"},
        "Tea, then more tea.",
        ["One tea."],
    ),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "less than"}, "One tea.", ["Tea tea."]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "Rocks are rocky.", ["A Rock.", "rock!"]),
    (
        "keywords:letter_frequency",
        {"letter": "E", "let_frequency": 3, "let_relation": "at least"},
        "eE e",
        ["ee", "none"],
    ),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "less than"}, "# one", ["##"]),
    ("language:response_language", {"language": "fr"}, FRENCH, ["The cat sleeps on the chair in the garden."]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        "One. Two! Is this three?",
        ["Dr. Smith met Mr. Jones, e.g. at noon. Yes."],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        "It costs 3.5 dollars. Yes.",
        ["A b. C d. E f."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "One\n***\nTwo",
        ["One", "One\n***\n***\nTwo", "One *** Two *** Three"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "a b-c", ["a b"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "a b", ["a b c"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weekend"},
        'Hello.\n\n"weekend, finally"',
        ["Hello.\n\nThe weekend", "weekend", "a\n\nweekend\n\nb"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "a"},
        "a b",
        ["b"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [address]", ["[name]", "[[" * 9_999]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\nP. S. more", ["Bye", "PS more"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye\np.p.s more", ["Bye\nP.S. more"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        "List:\n* one\n - two",
        ["* one", "* one\n* two\n* three", "**one**\n* two"],
    ),
    ("detectable_format:constrained_response", {}, "Hm. My answer is maybe.", ["My answer is perhaps.", "Yes."]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*one* and **two**",
        ["*one*", "** and **"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        ["SECTION 1\na", "Section 1 Section 2"],
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', ["{a: 1}", "Here: {}", "[" * 100_000]),
    ("detectable_format:title", {}, "<<A title>>\ntext", ["<< >>", "<title>", "<<a\nb>>"]),
    ("combination:two_responses", {}, "One\n******\nTwo", ["One", "One******One", "One******Two******Three"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. Yes", ["Yes. Say it."]),
    ("startend:end_checker", {"end_phrase": "Peace!"}, 'I say "peace!"', ["Peace! Yes."]),
    ("startend:quotation", {}, '"All of it."', ['"', 'He said "no"', "'x'"]),
    ("change_case:english_capital", {}, "THIS IS LOUD AND CLEAR ENGLISH", ["This is not", "123"]),
    ("change_case:english_lowercase", {}, "this is quiet and clear english", ["This is not", FRENCH.lower()]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "The NASA and the ESA-X fly",
        ["The NASA flies", "the Nasa and Esa"],
    ),
    ("punctuation:no_comma", {}, "no comma; none", ["one, two"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES, ids=[case[0] for case in CASES])
def test_instructions_judge_their_examples(name: str, arguments: dict[str, Any], right: str, wrong: list[str]) -> None:
    assert problem(name, arguments) == ""
    assert follows(right, name, arguments)
    assert [text for text in [*wrong, "", "  \n"] if follows(text, name, arguments)] == []


def test_all_25_are_tested() -> None:
    assert {case[0] for case in CASES} == set(INSTRUCTIONS) and len(INSTRUCTIONS) == 25


def test_sentences_of_ordinary_text_are_counted() -> None:
    text = 'He asked: "Why?" She left. Prof. J. Doe (b. 1950) paid $3.50, i.e. all... Then he slept!\n\nThe end'
    assert count_sentences(text) == 7  # "b." and "all..." end one, as for most readers


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("keywords:exist", {}, "no instruction 'keywords:exist'"),
        ("keywords:existence", {}, "needs keywords"),
        ("keywords:existence", {"keywords": "sun"}, "is not a list of words"),
        ("keywords:existence", {"keywords": []}, "is not a list of words"),
        ("startend:quotation", {"end_phrase": "x"}, "has no argument 'end_phrase'"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "more"}, "not one of less than, at least"),
        ("length_constraints:number_words", {"num_words": 2.5, "relation": "at least"}, "is not a count"),
        ("length_constraints:number_words", {"num_words": True, "relation": "at least"}, "is not a count"),
        ("length_constraints:number_words", {"num_words": float("inf"), "relation": "at least"}, "is not a count"),
        ("startend:end_checker", {"end_phrase": ""}, "is not text"),
    ],
)
def test_unverifiable_instructions_are_refused(name: str, arguments: dict[str, Any], told: str) -> None:
    assert told in problem(name, arguments)


def test_null_arguments_count_as_absent() -> None:
    assert problem("punctuation:no_comma", {"num_words": None, "relation": None}) == ""


def score(response: str, answer: Any = None, extra: dict[str, Any] | None = None, **options: Any) -> Score:
    reward = make_reward(RewardConfig(name="ifeval", options=options))
    (scored,) = reward.score([RewardItem(0, "d", "p", response, answer, extra or {})])  # type: ignore[misc]
    return scored


ROW = {
    "instruction_id_list": ["punctuation:no_comma", "detectable_format:title"],
    "kwargs": [{}, {}],
}


def test_the_reward_can_require_all_instructions_or_their_share() -> None:
    both, one = "<<T>>\ntext", "text"
    assert (score(both, extra=ROW).reward, score(one, extra=ROW).reward) == (1.0, 0.0)
    half = score(one, extra=ROW, partial=True)
    assert (half.reward, half.score, half.metrics) == (0.5, 0.0, {"instructions_followed": 0.5})
    assert score("<think>a, b</think>" + both, extra=ROW).reward == 1.0
    assert score("<think>" + both, extra=ROW).reward == 0.0
    for answer in (ROW, json.dumps(ROW), {"instruction_id_list": "punctuation:no_comma", "kwargs": None}):
        assert score(both, answer).reward == 1.0


def test_loose_checking_forgives_an_enclosing_frame_and_asterisks() -> None:
    framed = "Sure, here it is:\n<<T>>\ntext"
    assert (score(framed, extra=ROW).reward, score(framed, extra=ROW, reading="loose").reward) == (0.0, 1.0)
    assert len(loose_variants("a\nb\nc")) == 8 and "b" in loose_variants("*a*\n*b*\n*c*")
    assert score("", extra=ROW, reading="loose").reward == 0.0


@pytest.mark.parametrize(
    ("answer", "extra", "told"),
    [
        ("42", {}, "the row has no instruction_id_list and kwargs"),
        ("[" * 5_000, {}, "the row has no instruction_id_list and kwargs"),
        (None, {"instruction_id_list": []}, "is not a list of names"),
        (None, ROW | {"kwargs": [{}]}, "an object for each of the 2 instructions"),
        (None, ROW | {"kwargs": [{}, 3]}, "kwargs=3 of detectable_format:title is not an object"),
        (None, {"instruction_id_list": ["keywords:existence"]}, "needs keywords"),
    ],
)
def test_rows_are_checked_before_the_start(answer: Any, extra: dict[str, Any], told: str) -> None:
    assert told in make_reward(RewardConfig(name="ifeval")).problem_of_row(answer, extra)
    assert make_reward(RewardConfig(name="ifeval")).problem_of_row(answer, extra | ROW) == ""


@pytest.mark.skipif(not DATA.is_file(), reason="needs IFEval's input_data.jsonl beside the repository")
def test_every_row_of_ifeval_can_be_scored() -> None:
    reward = make_reward(RewardConfig(name="ifeval"))
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    assert len(rows) == 541
    assert [reward.problem_of_row(None, row) for row in rows] == [""] * 541
    assert {name for row in rows for name in row["instruction_id_list"]} == set(INSTRUCTIONS)
