"""Run with: python -m pytest"""

import json

import pytest
from my_reward import reward


@pytest.mark.parametrize(
    ("response", "points"), [("9 4 1", 1.0), (" 9 4 1\n", 1.0), ("9 1 4", 1 / 3), ("9 4", 0.0), ("", 0.0)]
)
def test_points(response: str, points: float) -> None:
    assert reward("9 4 1", response) == (points, points == 1)


def test_the_written_answers_get_full_points() -> None:
    with open("val.jsonl") as file:
        answers = [json.loads(line)["answer"] for line in file]
    assert all(reward(answer, answer) == (1, True) for answer in answers)
