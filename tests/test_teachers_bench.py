"""What tests.bench.teachers shows of its runs, and the pairs that it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench import own_pairs
from tests.bench.teachers_shown import crossing, goals, plots, tables


def _line(name: str, seed: int, greedy: dict[str, float], **others: Any) -> dict[str, Any]:
    return {"run": name, "seed": seed, "steps": max(map(int, greedy)), "greedy": greedy, "sampled": greedy, **others}


LINES = [
    _line("teacher", 0, {"0": 0.96, "1": 0.6}),
    _line("teacher", 1, {"0": 0.93, "1": 0.6}),
    _line("grpo", 0, {"0": 0.5, "10": 0.6, "20": 0.7, "30": 0.8, "60": 0.85, "80": 0.9}),
    _line("full_0", 1, {"0": 0.5, "10": 0.7, "20": 0.92, "30": 0.95}),
    _line("full_0", 0, {"0": 0.5, "10": 0.8, "20": 0.86, "30": 0.91}),
]


def test_the_goal_is_the_teacher_s_accuracy_on_the_seed_s_prompts_before_its_step() -> None:
    levels = goals({"teacher": LINES[:2]})
    assert levels == {0: pytest.approx(0.91), 1: pytest.approx(0.88)}
    assert [crossing(line, levels[line["seed"]]) for line in LINES[2:]] == [None, 20, 30]


def test_a_table_has_means_spreads_and_crossings_by_seed() -> None:
    head, _, grpo, full = tables(LINES).splitlines()
    assert "Step of the teacher's accuracy - 0.05, by seed" in head
    assert grpo.endswith("| 0.900 | over 80 |")
    assert "| 0.750 (0.700 to 0.800) |" in full
    assert full.endswith("| 30, 20 |")  # in the order of seeds, not of lines


def test_the_distance_is_that_of_a_whole_response(tmp_path: Path) -> None:
    scored = _line(
        *("scored", 0, {"0": 0.5, "2": 0.25}),
        **{"reward": {"1": 0.7, "2": 0.9}, "kl": {"1": 0.0, "2": 0.5}, "tokens": {"1": 10.0, "2": 8.0}},
    )
    assert "| 0.70, 0.90 | 0.500 | 0.500 (step 0) | 0.250 |" in (text := tables([scored]))
    assert text.endswith("| 4.00 |")  # .5 nats a token, 8 tokens
    plots([scored, {**scored, "run": "scored_kl"}], tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["overoptimisation.svg"]


class _Stored:
    """A reader of one step: a group with two good answers and three bad ones, and a group of equal scores."""

    GROUPS = ((0, 0.0, "2 1"), (0, 1.0, "1 2"), (0, 0.0, "2 1"), (0, 0.0, " "), (0, 0.0, "1 1"), (1, 0.0, "3"))

    def __init__(self, run: Path) -> None:
        import torch

        self.batch = self
        self.scores = torch.tensor([score for _, score, _ in self.GROUPS])
        self.group_ids = torch.tensor([group for group, _, _ in self.GROUPS])

    def steps(self) -> list[int]:
        return [1]

    def read(self, step: int) -> _Stored:
        return self

    def messages(self, row: int) -> list[dict[str, str]]:
        group, _, answer = self.GROUPS[row]
        return [{"role": "user", "content": f"sort {group}"}, {"role": "assistant", "content": answer}]


def test_a_group_gives_a_pair_of_each_different_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_pairs, "RolloutReader", _Stored)
    assert own_pairs.grouped_pairs(Path("run")) == [
        [
            {"prompt": "sort 0", "chosen": "1 2", "rejected": "2 1"},
            {"prompt": "sort 0", "chosen": "1 2", "rejected": "1 1"},
        ]
    ]
