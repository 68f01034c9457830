"""Rewards of vision recipes: boxes and points, counting, format, verl's functions for geo3k."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import DataConfig, RewardConfig
from hpcrl.data.rows import RawContext, parse_row
from hpcrl.rewards.grading.assignment import best_sum
from hpcrl.rewards.grading.boxes import boxes_of, giou, iou
from hpcrl.rewards.grading.number_words import last_number_word
from hpcrl.rewards.grading.written_boxes import written_shapes
from hpcrl.rewards.reward import RewardItem, Score, make_reward

GOLD = [0, 0, 10, 10]
SHIFTED = [5, 0, 15, 10]  # shares 50 of 150 with GOLD
PNG = b"\x89PNG\r\n\x1a\n"


def score(
    response: str, answer: Any = GOLD, extra: dict | None = None, name: str = "grounding", **options: Any
) -> Score:
    reward = make_reward(RewardConfig(name=name, options=options))
    (scored,) = reward.score([RewardItem(0, "d", "p", response, answer, extra or {})])  # type: ignore[misc]
    return scored


def problem(answer: Any, extra: dict | None = None, **options: Any) -> str:
    return make_reward(RewardConfig(name="grounding", options=options)).problem_of_row(answer, extra or {})


@pytest.mark.parametrize(
    ("other", "overlap", "generalised"),
    [
        ((0.0, 0.0, 10.0, 10.0), 1, 1),
        ((5.0, 0.0, 15.0, 10.0), 1 / 3, 1 / 3),  # the box around both is their union
        ((5.0, 5.0, 15.0, 15.0), 25 / 175, 25 / 175 - 50 / 225),
        ((2.0, 2.0, 4.0, 6.0), 8 / 100, 8 / 100),
        ((10.0, 0.0, 20.0, 10.0), 0, 0),
        ((20.0, 0.0, 30.0, 10.0), 0, -100 / 300),
    ],
)
def test_overlaps(other: Any, overlap: float, generalised: float) -> None:
    gold = (0.0, 0.0, 10.0, 10.0)
    assert iou(gold, other) == iou(other, gold) == pytest.approx(overlap)
    assert giou(gold, other) == giou(other, gold) == pytest.approx(generalised)


@pytest.mark.parametrize(
    "response",
    [
        '```json\n[\n\t{"bbox_2d": [5, 0, 15, 10], "label": "cat"}\n]\n```',  # Qwen2.5-VL, Qwen3-VL
        '{"bbox_2d": [5.0, 0, 15, 1e1], "label": "cat [1]"}',
        "[5, 0, 15, 10]",
        "[[5, 0, 15, 10]]",
        "The cat is at [5,0,15,10].",
        "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(5,0),(15,10)<|box_end|>",  # Qwen2-VL
        "cat (5,0),(15,10)",  # Qwen2-VL without control tokens
        "<ref>cat</ref><box>(5,0),(15,10)</box>",  # Qwen-VL
        "<box>[[5, 0, 15, 10]]</box>",  # InternVL
        "<box>5 0 15 10</box>",
        "<answer>[5, 0, 15, 10]</answer>",
        '<think>[1, 1, 2, 2]</think> <answer>{"bbox": [5, 0, 15, 10]}</answer>',  # VLM-R1
        "<think>[1, 1, 2, 2]</think>[5, 0, 15, 10]",
        "[1, 1, 2, 2] <answer>5, 0, 15, 10</answer>",
        "[{'Position': [5, 0, 15, 10], 'Confidence': 0.9}]",  # Visual-RFT
        r"not [1, 1, 2, 2] but \boxed{[5, 0, 15, 10]}",
        "5 0 15 10",
        "(5, 0, 15, 10)",
        "[5, 0, 15, 10], that is <box>(5,0),(15,10)</box>",  # a repeated box counts once
    ],
)
def test_a_box_is_read_in_every_published_form(response: str) -> None:
    result = score(response)
    assert (result.reward, result.score) == (pytest.approx(1 / 3), 0.0)
    assert result.extracted == "[[5.0, 0.0, 15.0, 10.0]]" and result.metrics["no_answer"] == 0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "there is none",
        "<think>[0, 0, 10, 10]",  # cut within the thinking
        "<answer>none</answer> [0, 0, 10, 10]",
        "[0, 0, 10]",
        "[0, 0, 10, 10, 5]",
        "[nan, 0, 10, 10]",
        "0 0 10 10 are the corners",
        "(0, 0) to (10, 10)",
        "[0, 0, ten, 10]",
    ],
)
def test_a_response_without_a_box_scores_0(response: str) -> None:
    for measure in ("iou", "giou"):
        result = score(response, measure=measure)
        assert result == Score(0.0, 0.0, metrics={"no_answer": 1.0, measure: 0.0})


@pytest.mark.parametrize("box", ["[10, 10, 0, 0]", "[5, 5, 5, 5]", "[0, 0, 1e999, 10]", "[-1e308, 0, 1e308, 10]"])
@pytest.mark.parametrize("measure", ["iou", "giou", "point"])
def test_a_box_without_an_area_or_beyond_all_bounds_scores_0(box: str, measure: str) -> None:
    assert (score(box, measure=measure).reward, score(box, measure=measure).score) == (0, 0)
    # it counts as a box of the response, so that the reward is 2 x 1 / (1 + 2)
    assert score(f"[0, 0, 10, 10], {box}", measure=measure).reward == pytest.approx(2 / 3)


def test_the_reward_is_the_measure_or_1_from_a_threshold_on() -> None:
    half = "[0, 0, 10, 5]"  # IoU 1/2
    assert (score(half).reward, score(half).score) == (0.5, 1.0)
    at, above = score(half, threshold=0.5), score(half, threshold=0.51)
    assert (at.reward, at.score, at.metrics["iou"]) == (1.0, 1.0, 0.5)
    assert (above.reward, above.score, above.metrics["iou"]) == (0.0, 0.0, 0.5)
    away = "[20, 0, 30, 10]"  # GIoU -1/3
    assert score(away, measure="giou").reward == pytest.approx(1 / 3)
    assert score(str(SHIFTED), measure="giou").reward == pytest.approx(2 / 3)  # GIoU 1/3
    assert score(str(SHIFTED), measure="giou", threshold=0.3).reward == 1
    assert score(away, measure="giou", threshold=0.3).reward == 0


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("(5, 5)", 1),
        ("[10, 0]", 1),  # a corner
        ("[11, 5]", 0),
        ('{"point_2d": [5, 5], "label": "cat"}', 1),
        ("<|box_start|>(5,5)<|box_end|>", 1),
        ("<answer>5, 5</answer>", 1),
        ("[0, 0, 18, 18]", 1),  # centre (9, 9)
        ("(0,0),(24,18)", 0),  # centre (12, 9)
        ("(1e999, 5)", 0),
        ("5", 0),
        ("(5, 5) (50, 50)", 2 / 3),
    ],
)
def test_a_point_is_right_within_the_box(response: str, right: float) -> None:
    result = score(response, measure="point")
    assert (result.reward, result.score) == (pytest.approx(right), float(right == 1))


def test_several_boxes_get_an_f1() -> None:
    gold = [[0, 0, 10, 10], [20, 0, 30, 10]]
    first, second, second_shifted = "[0, 0, 10, 10]", "[20, 0, 30, 10]", "[25, 0, 35, 10]"
    assert score(f"{second} {first}", gold) == Score(1.0, 1.0, metrics={"no_answer": 0.0, "iou": 1.0})
    one = score(first, gold)  # precision 1, recall 1/2
    assert (one.reward, one.score) == (pytest.approx(2 / 3), 0.0)
    both = score(f"{first} {second_shifted}", gold)  # 2 x (1 + 1/3) / 4
    assert (both.reward, both.score) == (pytest.approx(2 / 3), 0.0)
    assert score(f"{first} {second_shifted}", gold, threshold=0.5).reward == 0.5  # precision 1/2, recall 1/2
    sprayed = " ".join(f"[{x}, 0, {x + 10}, 10]" for x in range(0, 30, 2))  # 15 boxes for one
    assert score(sprayed).reward == pytest.approx(2 / 16)


def test_points_and_boxes_are_assigned_as_well_as_possible() -> None:
    gold = [[0, 0, 10, 10], [0, 0, 20, 20]]
    assert score("(5, 5) (15, 15)", gold, measure="point").reward == 1  # the first point lies in both
    assert score("(15, 15) (5, 5)", gold, measure="point").reward == 1
    chance = random.Random(0)
    for rows, columns in itertools.product(range(1, 5), range(1, 5)):
        values = [[chance.choice([0.0, chance.random(), 1.0]) for _ in range(columns)] for _ in range(rows)]
        wide = values if rows <= columns else [list(column) for column in zip(*values, strict=True)]
        tried = itertools.permutations(range(max(rows, columns)), min(rows, columns))
        best = max(sum(row[at] for row, at in zip(wide, places, strict=True)) for places in tried)
        assert best_sum(values) == pytest.approx(best)


@pytest.mark.parametrize(
    "answer",
    [
        [0, 0, 10, 10],
        "[0, 0, 10, 10]",
        [[0, 0, 10, 10], [0.0, 0.0, 10.0, 10.0]],
        {"bbox_2d": [0, 0, 10, 10], "label": "cat"},
        '[{"bbox": [0, 0, 10, 10]}]',
        {"box": [0, 0, 10, 10]},
        "<answer>[0, 0, 10, 10]</answer>",
        "(0,0),(10,10)",
    ],
)
def test_a_rows_boxes_may_have_several_forms(answer: Any) -> None:
    assert boxes_of(answer) == [(0.0, 0.0, 10.0, 10.0)] and problem(answer) == ""


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("none", "the answer 'none' has no box [x1, y1, x2, y2]"),
        ([], "the answer '[]' has no box"),
        ([1, 2], "'1' in the answer is not a box [x1, y1, x2, y2], nor an object with bbox_2d"),
        ({"x": 3}, "\"{'x': 3}\" in the answer is not a box"),
        ([["0", "0", "1", "1"]], "in the answer is not a box"),
        ([10, 10, 0, 0], "the box '[10, 10, 0, 0]' in the answer has no area"),
        ("[0, 0, NaN, 1]", "has no area"),
        ([0, 0, 10**400, 1], "has no area"),
        ([True, 0, 10, 10], "is not a box"),
        ("[" * 100_000, "has no box"),
        ([[x, 0, x + 1, 1] for x in range(101)], "the answer has more than 100 boxes"),
    ],
)
def test_a_row_without_a_usable_box_is_refused(answer: Any, message: str) -> None:
    assert message in problem(answer)
    with pytest.raises(ValueError, match="box"):
        score("[0, 0, 1, 1]", answer)


def test_relative_coordinates_are_compared_with_pixels() -> None:
    answer, response = [64, 48, 320, 240], '[{"bbox_2d": [100, 100, 500, 500]}]'  # of 640 x 480 pixels
    for extra in ({"image_size": [640, 480]}, {"width": 640, "height": 480}, {"image_size": [640, 480], "width": 1}):
        result = score(response, answer, extra, response_coordinates="relative_1000")
        assert (result.reward, result.score) == (pytest.approx(1), 1.0)
        assert problem(answer, extra, response_coordinates="relative_1000") == ""
    pointed = {"measure": "point", "response_coordinates": "relative_1000"}
    assert score("(499, 101)", answer, {"image_size": [640, 480]}, **pointed).reward == 1
    assert score("(501, 101)", answer, {"image_size": [640, 480]}, **pointed).reward == 0
    assert 0 < score(response, answer).reward < 0.5
    unusable: tuple[dict[str, Any], ...] = (
        {}, {"image_size": 640}, {"width": 640}, {"image_size": [0, 480]}, {"image_size": ["640", "480"]},
    )  # fmt: skip
    for extra in unusable:
        text = problem(answer, extra, response_coordinates="relative_1000")
        assert text.startswith("response_coordinates=relative_1000 needs the picture's size in pixels")
        with pytest.raises(ValueError, match="column image_size, \\[width, height\\], or columns width and height"):
            score(response, answer, extra, response_coordinates="relative_1000")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0}, "threshold: Input should be greater than 0"),
        ({"threshold": 1.5}, "threshold: Input should be less than or equal to 1"),
        ({"measure": "point", "threshold": 0.5}, "threshold=0.5: not read with measure=point"),
        ({"measure": "dice"}, "measure"),
    ],
)
def test_invalid_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward(RewardConfig(name="grounding", options=options))


HOSTILE = {
    "many boxes": " ".join(f"[{x}, 0, {x + 1}, 1]" for x in range(20_000)),
    "one box often": "[0, 0, 10, 10]" * 20_000,
    "deep": "[" * 200_000,
    "deep and numbers": "[[1, 1], " * 50_000,
    "digits": "[" + "1" * 200_000,
    "digits in a box": f"[0, 0, {'9' * 200_000}, 10]",
    "white space": "[" + " " * 200_000 + "1," + " " * 200_000,
    "parentheses": "(1, 1)," * 50_000,
    "open tags": "<answer>" * 50_000,
    "box tags": "<box>1 " * 50_000,
    "fences": "```\n" * 50_001,
    "a long list": "[" + "1, " * 100_000 + "]",
    "bare numbers": "1 " * 100_000,
    "nested objects": '{"bbox_2d": ' * 50_000 + "[0, 0, 1, 1]",
    "signs and points": "[-+.e" * 50_000,
    "other digits": "[\u0660, \u0660, \u0661, \uff11]",
    "half a character": "[0, 0, 1, \ud800]",
}


@pytest.mark.parametrize("measure", ["iou", "giou", "point"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_scored_in_time(text: str, measure: str) -> None:
    start = time.thread_time()
    result = score(text, [[x, 0, x + 1, 1] for x in range(100)], measure=measure)
    assert time.thread_time() - start < 2 and 0 <= result.reward < 0.1 and not result.error


def test_as_many_boxes_as_possible_are_compared_in_time() -> None:
    chance = random.Random(0)
    boxes = [[x := chance.random() * 100, y := chance.random() * 100, x + 30, y + 30] for _ in range(100)]
    start = time.thread_time()
    assert score(str(boxes[::-1]), boxes).reward == pytest.approx(1)
    assert time.thread_time() - start < 4
    assert len(written_shapes(str(boxes) + "[0, 0, 1, 1]", 100)) == 101
    assert score(str(boxes) + "[0, 0, 1, 1]", boxes).metrics["no_answer"] == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("three cats", 3),
        ("Twenty-one", 21),
        ("ninety nine", 99),
        ("zero", 0),
        ("two dogs and fourteen cats", 14),
        ("sixty", 60),
        ("someone and seventh", None),
        ("one hundred", None),
        ("two thirds", None),
        ("", None),
    ],
)
def test_number_words(text: str, number: float | None) -> None:
    assert last_number_word(text) == number


@pytest.mark.parametrize(
    ("response", "words", "right"),
    [
        ("There are 3 cats.", False, 1),
        ("<think>1, 2, 3, 4</think><answer>3</answer>", False, 1),
        ("I count 3.", False, 1),
        ("There are three cats.", False, 0),
        ("There are three cats.", True, 1),
        ("<answer>Three</answer>", True, 1),
        ("There are four cats.", True, 0),
        ("There are 3 of them, or 4 with this one.", True, 0),  # words count only without digits
    ],
)
def test_objects_are_counted_with_numeric(response: str, words: bool, right: float) -> None:
    for answer in (3, "3", *(["three"] if words else [])):
        assert score(response, answer, name="numeric", words=words).reward == right


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<think>a box</think>\n<answer>[0, 0, 10, 10]</answer>", 1),
        ("<think>a box</think><answer>[0, 0, 10, 10]</answer>\n", 1),
        ("<answer>[0, 0, 10, 10]</answer>", 0),
        ("<think>a box</think>[0, 0, 10, 10]", 0),
        ("<think>a box</think><answer>[0, 0, 10, 10]</answer> sure", 0),
        ("<think></think><answer>[0, 0, 10, 10]</answer>", 0),
    ],
)
def test_the_format_of_think_and_answer_is_rewarded_with_tags(response: str, right: float) -> None:
    form = {"name": "tags", "options": {"tags": ["think", "answer"], "answer_after": False}, "weight": 0.1}
    parts = {"boxes": {"name": "grounding"}, "form": form}
    result = score(response, name="composed", parts=parts)
    assert result.reward == pytest.approx(1 + 0.1 * right) and result.score == 1


@pytest.mark.parametrize(
    ("response", "right"),
    [("<think>a</think> \\boxed{3}.", 1), ("\\boxed{3}", 0), ("<think>a</think> 3", 0), ("<think>\\boxed{3}", 0)],
)
def test_the_format_of_geo3k_is_rewarded_with_regex(response: str, right: float) -> None:
    pattern = r"<think>.*</think>.*\\boxed\{.*\}.*"
    assert score(response, None, name="regex", pattern=pattern, whole=True, with_thinking=True).reward == right


GEO3K = {  # as verl's examples/data_preprocess/geo3k.py writes rows
    "data_source": "hiyouga/geometry3k",
    "prompt": [{"role": "user", "content": "<image>Find x. Put your final answer within \\boxed{}."}],
    "images": [{"bytes": PNG, "path": None}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2 \\sqrt 3"},
    "extra_info": {"split": "train", "index": 7, "answer": "2 \\sqrt 3", "question": "<image>Find x."},
}


@pytest.mark.parametrize(
    ("response", "reward", "right"),
    [
        ("<think>As in the picture.</think>It is \\boxed{2\\sqrt 3}.", 1.0, 1),
        ("It is \\boxed{2\\sqrt 3}.", 0.9, 1),
        ("<think>As in the picture.</think>It is \\boxed{3}.", 0.1, 0),
        ("No.", 0.0, 0),
    ],
)
def test_verls_functions_for_geo3k_score_its_rows(response: str, reward: float, right: float) -> None:
    row = parse_row(GEO3K, RawContext(DataConfig(train="geo3k.parquet"), "geo3k.parquet:1"))
    assert len(row.images) == 1 and row.domain == "hiyouga/geometry3k"
    item = RewardItem(0, row.domain, "Find x.", response, row.answer, row.extra)
    file = Path(__file__).with_name("vision_rewards.py")
    own = make_reward(RewardConfig(name="function", function=f"{file}:compute_score"))
    (scored,) = own.score([item])  # type: ignore[misc]
    assert scored.reward == scored.score == pytest.approx(reward)
    assert scored.metrics == {"acc": right, "index": 7.0}
    assert item.extra["extra_info"] == GEO3K["extra_info"], "as verl gives it to the function"
    scorer = make_reward(RewardConfig(name="function", function=f"{file}:geo3k", options={"format_score": 0.2}))
    (scored,) = scorer.score([item])  # type: ignore[misc]
    assert scored.reward == pytest.approx(0.8 * right + 2 * (reward - 0.9 * right))
