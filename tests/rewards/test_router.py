"""Which reward a domain gets, and what is found wrong before the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config import Config, DataConfig, DataSource, RewardConfig
from hpcrl.rewards.router import Router, validate_rewards

FILE = Path(__file__).with_name("user_rewards.py")
MATH, EXACT = RewardConfig(name="math"), RewardConfig(name="exact_match")


def jsonl(path: Path, *rows: dict) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_own_section_then_default_then_the_only_one():
    router = Router(Config(reward={"a": MATH, "default": EXACT}))
    assert router.of("a") is MATH and router.of("b") is EXACT
    assert Router(Config(reward={"a": MATH})).of("b") is MATH
    both = Router(Config(reward={"a": MATH, "b": EXACT}))
    with pytest.raises(ValueError, match=r"domain 'c' has no reward: set reward.c.name or .* \(there are: a, b\)"):
        both.of("c")


def test_sources_bring_their_rewards(tmp_path: Path):
    gsm8k = jsonl(tmp_path / "gsm8k.jsonl", {"question": "q", "answer": "5\n#### 5"})
    boxed = jsonl(tmp_path / "boxed.jsonl", {"problem": "q", "solution": r"\boxed{5}", "tag": "algebra"})
    train = ["task:sort_digits", DataSource(path="task:add", tag="sums"), "reasoning_gym:gcd", gsm8k, boxed]
    router = Router(Config(data=DataConfig(train=train)))
    assert {domain: section.name for domain, section in router.sections.items()} == {
        "sort_digits": "sort_digits", "sums": "exact_match", "gcd": "reasoning_gym", "default": "math",
        "algebra": "math",
    }  # fmt: skip


def test_nothing_wrong(tmp_path: Path):
    data = DataConfig(train=["task:add", jsonl(tmp_path / "a.jsonl", {"prompt": "a", "answer": "#### 1"})])
    assert validate_rewards(Config(data=data)) == []
    assert validate_rewards(Config(reward={"default": RewardConfig(name="function", function=f"{FILE}:trl")})) == []


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path):
    (tmp_path / "deadly.py").write_text("import os\nos._exit(7)\n")
    data = DataConfig(train=jsonl(tmp_path / "a.jsonl", {"prompt": "a", "tag": "x"}, {"prompt": "b", "tag": "y"}))
    reward = {
        "x": RewardConfig(options={"patern": "a"}),
        "f": RewardConfig(name="function", function=f"{FILE}:unknown"),
        "g": RewardConfig(name="function", function=f"{tmp_path}/deadly.py:f"),
    }
    problems = validate_rewards(Config(data=data, reward=reward))
    assert len(problems) == 4 and all("\n" not in problem for problem in problems)
    for problem, start, text in zip(
        problems,
        ("reward.x: options:", "reward.f: function:", "reward.g: function:", "domain 'y'"),
        ("there is no option 'patern'", "fit no known signature", "ended the process with 7", "set reward.y.name"),
        strict=True,
    ):
        assert problem.startswith(start) and text in problem
