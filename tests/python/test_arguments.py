"""Keywords of hpcrl.plan and hpcrl.train become the words that give the same configuration on the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.config import load
from hpcrl.config.compose import compose
from hpcrl.python.arguments import arguments_of

TEXTS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12)
HARD = st.one_of(
    TEXTS,
    st.text("\\'\"${}[]:=,~ \n\tax1", max_size=10),
    st.sampled_from(["true", "Null", "1e5", "nan", "???", "${a}"]),
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), HARD)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=4)


@settings(deadline=None, max_examples=60)
@given(VALUES)
def test_a_value_arrives_as_it_was_given(value: Any) -> None:
    assert compose(arguments_of((), {"own": {"key": value}})).data["own"]["key"] == value


@pytest.mark.parametrize("name", ["a.jsonl", "/data/my file.jsonl", "task:sort", "x(1)"])
def test_keys_of_a_mapping_may_be_paths(name: str) -> None:
    assert compose(arguments_of((), {"data": {"train": {name: 2}}})).data["data"]["train"] == {name: 2}


def test_groups_nested_keys_and_words_are_those_of_the_command() -> None:
    mine = arguments_of(
        ["trainer.lr=1e-3", "++max_steps=3"],
        {
            "experiment": "demo", "layout": "single", "run_name": "12e4567", "algorithm": {"num_mini_batches": 2},
            "rollout": {"stop": ["a,b", "}"]}, "data": {"train": Path("/x/a.jsonl")}, "seed": np.int64(4),
        },
    )  # fmt: skip
    words = ["trainer.lr=1e-3", "max_steps=3", "+experiment=demo", "layout=single", "run_name=12e4567"]
    words += ["algorithm.num_mini_batches=2", "rollout.stop=['a,b','}']", "data.train=/x/a.jsonl", "seed=4"]
    assert load(mine).model_dump() == load(words).model_dump()


def test_a_part_by_path_replaces_the_experiments_part_and_its_options() -> None:
    words = arguments_of((), {"experiment": "demo_agentic", "env": "games.py:Own"})
    assert compose(["+experiment=demo_agentic"]).data["env"]["default"]["options"], "else nothing is replaced"
    env = compose(words).data["env"]["default"]
    assert (env["name"], env["class_path"]) == ("class", "games.py:Own")
    assert (
        "options" not in env
        and env["max_turns"] == compose(["+experiment=demo_agentic"]).data["env"]["default"]["max_turns"]
    )


def test_parts_by_domain_by_name_and_as_keys() -> None:
    words = arguments_of(
        (), {"reward": {"a": "m.py:f", "b": "math", "c": {"name": "tags", "options": {"tags": ["x"]}}}}
    )
    assert compose(words).data["reward"] == {
        "a": {"name": "function", "function": "m.py:f"},
        "b": {"name": "math"},
        "c": {"name": "tags", "options": {"tags": ["x"]}},
    }


@pytest.mark.parametrize(
    ("words", "keys", "text"),
    [
        ((), {"trainer": {"lr": object()}}, "trainer.lr: object is no value of a key"),
        ((), {"trainer": {"lr": len}}, "trainer.lr: a function or class is given as reward=... or env=..."),
        ((), {"reward": len}, "len: defined in no file"),
        (("-m", "seed=1,2"), {}, "-m: no option for a call from Python"),
        ((["seed=1"],), {}, "['seed=1']: a word is text such as 'trainer.lr=1e-5'"),
    ],
)  # fmt: skip
def test_what_cannot_be_given_is_refused_in_one_line(words: Any, keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        arguments_of(words, keys)
    assert "\n" not in str(error.value)
