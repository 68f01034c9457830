"""Example episodes before the first prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvConfig
from hpcrl.envs.examples import example_messages

LAKE = {"name": "frozen_lake", "options": {"size": 3}, "max_turns": 6, "examples": 2}
USER, ASSISTANT = {"role": "user", "content": "P _ G"}, {"role": "assistant", "content": "Right"}


def shown(**keys: Any) -> list[dict[str, Any]]:
    return example_messages(EnvConfig(**LAKE | keys), "default", seed=3)


def test_the_expert_plays_the_same_examples_for_every_sample() -> None:
    messages = shown()
    assert messages == shown() and [message["role"] for message in messages] == ["user", "assistant"] * (
        len(messages) // 2
    )
    starts = [message["content"] for message in messages if message["content"].startswith("You are on a frozen lake")]
    assert len(set(starts)) == 2 and all(message["content"].startswith("<answer>") for message in messages[1::2])
    assert messages[: len(shown(examples=1))] == shown(examples=1)
    assert example_messages(EnvConfig(**LAKE), "default", seed=4) != messages
    assert len(shown(max_turns=1)) == 4 and shown(examples=0) == []


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_dialogues_from_a_file_keep_their_order(tmp_path: Path) -> None:
    rows = {"messages": [USER, ASSISTANT, USER, ASSISTANT]}, {"prompt": "2 + 2", "answer": "4"}, {"messages": [USER]}
    path = write(tmp_path / "shots.jsonl", *rows)
    sum_of_two = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    assert shown(name="scripted", options={}, examples_path=path) == [USER, ASSISTANT, USER, ASSISTANT, *sum_of_two]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"messages": [USER]}, "jsonl:1: an example must end with an assistant message"),
        ({"messages": [{"role": "system", "content": "Play."}, USER, ASSISTANT]}, "an example has no system message"),
        ({"text": "P"}, "jsonl:1: no prompt"),
        (None, "holds no rows"),
        ({"messages": [USER, ASSISTANT]}, "has 1 dialogues, fewer than examples=2"),
    ],
)
def test_unusable_dialogues_are_refused(tmp_path: Path, row: dict[str, Any] | None, error: str) -> None:
    path, rows = tmp_path / "shots.jsonl", [] if row is None else [row]
    with pytest.raises(ValueError, match=error) as refused:
        shown(examples_path=write(path, *rows), examples=2 if "2" in error else 1)
    assert str(refused.value).startswith(f"env.default.examples_path: {path}")
    with pytest.raises(ValueError, match=r"absent\.jsonl: no such file"):
        shown(examples_path="absent.jsonl")
