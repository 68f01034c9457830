"""Exact match, sorted digits and reasoning-gym; and how a section becomes a reward."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hpcrl.config import RewardConfig
from hpcrl.data.tasks import make_task
from hpcrl.rewards.reward import RewardItem, Score, make_reward
from hpcrl.spec.tables import REWARDS


def score(name: str, response: str, answer: Any, extra: dict | None = None, **options: Any) -> Score:
    reward = make_reward(RewardConfig(name=name, options=options))
    return reward.score([RewardItem(0, "d", "p", response, answer, extra or {})])[0]


@pytest.mark.parametrize(
    ("response", "answer", "options", "right"),
    [
        (" Paris.\n", "paris", {}, 1),
        ("the  Paris", "the Paris", {}, 1),
        ("in Paris", "Paris", {}, 0),
        ("<think>Rome</think>Paris", "Paris", {}, 1),
        ("<think>Paris", "Paris", {}, 0),
        ("paris", "Paris", {"ignore_case": False}, 0),
        ("ﬁve", "five", {}, 1),
        ("B", ["A", "B"], {}, 1),
        ("4", 4, {}, 1),
        ("true", True, {}, 1),
        ("answer: Rome. answer: Paris", "Paris", {"pattern": r"answer: (\w+)"}, 1),
        ("answer: Paris. answer: Rome", "Paris", {"pattern": r"answer: (\w+)"}, 0),
        ("no idea", "Paris", {"pattern": r"answer: (\w+)"}, 0),
        ("it is 42!", "42", {"pattern": r"\d+"}, 1),
    ],
)
def test_exact_match(response: str, answer: Any, options: dict, right: float):
    result = score("exact_match", response, answer, **options)
    assert (result.reward, result.score) == (right, right)


def test_a_users_pattern_runs_in_a_separate_process():
    assert make_reward(RewardConfig()).inline
    assert not make_reward(RewardConfig(options={"pattern": "(a+)+$"})).inline


@pytest.mark.parametrize(
    ("response", "partial", "reward", "right"),
    [
        ("1 2 3 4", 0.0, 1.0, 1.0),
        (" 1 2 3 4\n", 0.5, 1.0, 1.0),
        ("1 2 4 3", 0.0, 0.0, 0.0),
        ("1 2 4 3", 0.5, 0.25, 0.0),
        ("1 2", 0.5, 0.25, 0.0),
        ("1 2 3 4 5 6 7 8", 0.5, 0.25, 0.0),
        ("1  2 3 4", 0.0, 0.0, 0.0),
        ("", 0.5, 0.0, 0.0),
    ],
)
def test_sort_digits(response: str, partial: float, reward: float, right: float):
    result = score("sort_digits", response, "1 2 3 4", partial=partial)
    assert (result.reward, result.score) == (reward, right)


@pytest.mark.parametrize("name", ["chain_sum", "rearc", "knights_knaves"])
def test_reasoning_gym_gold_answers_score_1_after_a_json_round_trip(name: str):
    import json

    row = json.loads(json.dumps(make_task(f"reasoning_gym:{name}", {}, 4, 0, "train").row(2)))
    for response in (row["answer"], f"<think>hm</think>So <answer>0</answer> <answer> {row['answer']} </answer>"):
        result = score("reasoning_gym", response, row["answer"], row)
        assert (result.reward, result.score) == (1.0, 1.0)
    assert score("reasoning_gym", "nonsense", row["answer"], row).score == 0


def test_reasoning_gym_partial_credit_and_threshold():
    row = make_task("reasoning_gym:sudoku", {}, 1, 0, "train").row(0)
    wrong = ("5" if row["answer"][0] != "5" else "6") + row["answer"][1:]
    graded = score("reasoning_gym", wrong, row["answer"], row)
    assert 0 < graded.reward < 1 and graded.score == 0
    assert score("reasoning_gym", wrong, row["answer"], row, threshold=1.0).reward == 0
    low = score("reasoning_gym", wrong, row["answer"], row, threshold=0.0)
    assert (low.reward, low.score) == (1.0, 1.0)


def test_reasoning_gym_entries_are_read_from_a_file():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    assert score("reasoning_gym", entry["answer"], entry["answer"], {"metadata": entry["metadata"]}).score == 1
    with pytest.raises(ValueError, match=r"not a reasoning-gym entry: it has no metadata.source_dataset"):
        score("reasoning_gym", "1", "1", {})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exact_match", {"patern": "x"}, r"there is no option 'patern' \(there are: pattern, ignore_case\)"),
        ("exact_match", {"pattern": "("}, r"pattern: '\(' is not a regular expression"),
        ("math", {"max_answer_chars": 0}, "max_answer_chars: Input should be greater than or equal to 1"),
        ("sort_digits", {"partial": 2}, "partial: Input should be less than or equal to 1"),
        ("function", {}, r"needs a function, package.module:callable or file.py:callable"),
    ],
)
def test_invalid_options_are_named(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_reward(RewardConfig(name=name, options=options))


@pytest.mark.parametrize("name", list(REWARDS))
def test_every_listed_reward_can_be_configured(name: str) -> None:
    assert RewardConfig(name=name).name == name
    with pytest.raises(ValidationError, match=r"'exact_match', .* or 'function'"):
        RewardConfig(name=f"{name}_")


def test_a_fake_reward_accepts_a_fixed_share_of_samples_reproducibly() -> None:
    reward = make_reward(RewardConfig(name="fake", options={"pass_rate": 0.3}))
    items = [RewardItem(sample << 14, "d", "p", "r") for sample in range(2000)]
    scores = [score.score for score in reward.score(items)]
    assert set(scores) == {0.0, 1.0} and abs(sum(scores) / len(scores) - 0.3) < 0.04
    assert [score.reward for score in reward.score(items)] == scores
    assert reward.inline and not make_reward(RewardConfig(name="fake", options={"latency_s": 0.1})).inline
    with pytest.raises(ValueError, match="pass_rate"):
        make_reward(RewardConfig(name="fake", options={"pass_rate": 2}))
