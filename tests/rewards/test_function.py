"""User functions: their signatures, their results, and error messages."""

from __future__ import annotations

import asyncio
import re
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import RewardConfig
from hpcrl.rewards.function import FunctionReward
from hpcrl.rewards.reward import RewardItem, Score

FILE = Path(__file__).with_name("user_rewards.py")
MODULE = "tests.rewards.user_rewards"


def make(name: str, **section: Any) -> FunctionReward:
    return FunctionReward(RewardConfig(name="function", function=f"{FILE}:{name}", **section))


def item(response: str, answer: Any = "a", **extra: Any) -> RewardItem:
    return RewardItem(1, "domain", "p:", response, answer, extra)


def test_verl():
    reward = make("compute_score")
    assert reward.signature == "verl" and not reward.batched
    assert reward.score([item("a"), item("b")]) == [Score(1.0, 1.0), Score(0.0, 0.0)]
    assert reward.score([item("dict")]) == [Score(0.5, 0.5, metrics={"acc": 1.0})]
    verl_row = item("source", data_source="openai/gsm8k", extra_info={"index": 7})
    assert reward.score([verl_row]) == [Score(1.0, 1.0, metrics={"gsm8k": 1.0, "index": 7.0})]


def test_verl_batched():
    reward = make("compute_scores", options={"bonus": 0.5})
    assert reward.signature == "verl_batched" and reward.batched
    rows = [item("a", extra_info={"index": 7}), item("b"), item("a"), item("c", "c", data_source="gsm8k")]
    assert reward.score(rows) == [
        Score(1.5, 1.5, metrics={"index": 7.0}), Score(0.5, 0.5, metrics={"index": -1.0}), Score(1.5, 1.5),
        Score(1.5, 1.5),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="2 results for 3 responses"):
        reward.score([item("a"), item("b"), item("short")])


def test_a_trl_function_gets_all_columns_and_options():
    reward = make("trl", options={"bonus": 0.5})
    assert reward.signature == "trl" and reward.batched
    items = [item("xx", level=1), item("skip", level=2), item("", level=3)]
    assert [s.reward for s in reward.score(items)] == [3.5, 0.0, 3.5]
    with pytest.raises(ValueError, match="1 results for 2 responses"):
        reward.score([item("short", level=1), item("b", level=2)])


def test_an_asynchronous_trl_function_with_few_columns_works():
    assert [s.score for s in make("trl_async").score([item("a"), item("b")])] == [1.0, 0.0]


def test_a_trl_function_with_message_lists_works():
    assert make("trl_messages", options={"conversational": True}).score([item("yes")]) == [Score(1.0, 1.0)]


def test_openrlhf():
    reward = make("reward_func")
    assert reward.signature == "openrlhf"
    assert reward.score([item("a"), item("bb")]) == [
        Score(1.0, 0.5, metrics={"length": 3.0}),
        Score(0.0, 0.5, metrics={"length": 4.0}),
    ]


def test_openrlhf_logs_may_be_scalars():
    both = make("openrlhf_scalars").score([item("a"), item("b")])
    assert both == [
        Score(1.0, 1.0, metrics={"mean": 0.5, "max": 2.5, "each": 2.0, "numpy": 0.0}),
        Score(0.0, 0.0, metrics={"mean": 0.5, "max": 2.5, "each": 0.0, "numpy": 0.0}),
    ]
    assert make("openrlhf_one").score([item("a")]) == [Score(0.5, 0.5)]


def test_a_trl_function_with_only_token_ids_works():
    reward = make("completion_lengths")
    assert reward.signature == "trl" and reward.batched
    items = [replace(item("ab"), token_ids=array("i", [3, 4])), replace(item(""), token_ids=())]
    assert [score.reward for score in reward.score(items)] == [7.0, 0.0]
    with pytest.raises(ValueError, match="needs completion_ids, but the response came without token ids"):
        reward.score([item("ab")])


@pytest.mark.parametrize("name", ["last_message", "get_content"])
def test_the_trl_message_style_is_detected(name: str):
    reward = make(name)
    for _ in range(2):
        assert [score.reward for score in reward.score([item("yes"), item("no")])] == [1.0, 0.0]


def test_an_undetected_trl_message_style_is_reported():
    with pytest.raises(TypeError, match=r"string indices .* may need options.conversational=true\)"):
        make("broken_messages").score([item("yes")])
    with pytest.raises(TypeError, match=r"'list' object .* may need options.conversational=false\)"):
        make("only_text", options={"conversational": True}).score([item("yes")])
    reward = make("only_text")
    assert reward.score([item("yes")]) == [Score(1.0, 1.0)]
    with pytest.raises(KeyError):
        make("trl").score([item("raise", level=1)])


def test_native_functions_objects_and_import_paths_work():
    assert make("native").score([item("a"), item("b")]) == [Score(1.0, 1.0), Score(0.0, 0.0)]
    assert make("Judge").score([item("a")]) == [Score(1.0, 1.0)]
    by_module = FunctionReward(RewardConfig(name="function", function=f"{MODULE}:native"))
    assert by_module.signature == "hpcrl" and by_module.score([item("a")]) == [Score(1.0, 1.0)]


@pytest.mark.parametrize("response", ["text", "none"])
def test_a_result_that_is_not_a_number_is_an_error(response: str):
    with pytest.raises(TypeError, match="not a number"):
        make("compute_score").score([item(response)])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f"{FILE}:nothing", "has no nothing"),
        (f"{FILE}:NUMBER", "NUMBER is not callable, it is int"),
        (f"{FILE}:Unmakable", r"Unmakable\(\) raised RuntimeError: no weights"),
        (f"{FILE}:unknown", r"parameters \(a, b\) fit no known signature"),
        (f"{FILE}:wrong_pool", r"wrong_pool: pool = 'async' needs a function made with async def"),
        (f"{FILE}:wrong_scores", r"wrong_scores: scores = 'groups' needs a signature with many responses"),
        (f"{FILE}:unknown_scores", r"unknown_scores: scores = 'pairs': expected samples or groups"),
        ("nowhere.py:f", "no such file"),
        ("no_such_module:f", "importing no_such_module failed: ModuleNotFoundError"),
        ("justaname", r"an import path is package.module:callable or file.py:callable"),
    ],
)
def test_functions_with_unsupported_signatures_are_refused(function: str, message: str):
    with pytest.raises(ValueError, match=message):
        FunctionReward(RewardConfig(name="function", function=function))


def test_the_error_of_a_failing_file_is_named(tmp_path: Path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match=r"broken.py:f: running the file failed: SyntaxError"):
        FunctionReward(RewardConfig(name="function", function=f"{tmp_path}/broken.py:f"))


def test_a_signature_can_be_configured():
    assert make("any_parameters", signature="verl").score([item("a")]) == [Score(1.0, 1.0)]
    with pytest.raises(ValueError, match=r":unknown: signature verl gives no a, b; it gives data_source, .*options"):
        make("unknown", signature="verl")
    assert make("unknown", signature="openrlhf", options={"a": 1, "b": 2}).signature == "openrlhf"


def test_the_documented_examples_are_rewards(tmp_path: Path):
    document = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    document = document.partition("### Rewards of turns and tokens")[0]  # its examples: test_parts.py
    blocks = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "mine.py").write_text("\n".join(blocks))
    score = FunctionReward(RewardConfig(name="function", function=f"{tmp_path}/mine.py:score"))
    assert [each.reward for each in score.score([item("a"), item("b"), item("a\nb")])] == [1.5, 1.0, 0.0]
    compare = FunctionReward(RewardConfig(name="function", function=f"{tmp_path}/mine.py:compare"))
    assert (compare.scores, compare.pool, compare.signature) == ("groups", "async", "hpcrl")


def test_nemo_rl_functions_work():
    reward = make("nemo", options={"bonus": 0.5})
    assert reward.signature == "nemo_rl" and not reward.batched
    assert reward.score([item("a"), item("b"), item("form")]) == [Score(1.5, 1.0), Score(0.5, 0.0), Score(0.25, 0.25)]
    with pytest.raises(TypeError, match="returned float, not a pair"):
        reward.score([item("one")])


def test_nemo_rl_environments_work():
    reward = make("Environment")
    assert reward.signature == "hpcrl" and reward.batched and reward.scores == "samples"
    assert reward.score([item("a"), item("b")]) == [Score(1.0, 1.0), Score(0.0, 0.0)]
    assert reward.score([item("b", extra_env_info={"ground_truth": "b"})]) == [Score(1.0, 1.0)]
    with pytest.raises(ValueError, match="it is a Ray actor, but hpcrl does not use Ray"):
        make("RayActor")


@pytest.mark.parametrize("name", ["Recorded", pytest.param("rubric", marks=pytest.mark.outside)])
def test_verifiers_rubrics_work(name: str):
    """Recorded: its interface; rubric: the package itself, where it is installed."""
    if name == "rubric":
        pytest.importorskip("verifiers.rubrics.rubric")
    reward = make(name)
    assert (reward.signature, reward.scores, reward.pool) == ("hpcrl", "samples", "async")
    scores = asyncio.run(reward.score([item("a", level=2), item("b", level=0)]))
    assert scores == [
        Score(2.0, 2.0, metrics={"right": 1.0, "hard": 2.0}),
        Score(0.0, 0.0, metrics={"right": 0.0, "hard": 0.0}),
    ]
    messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "b"}]
    messages += [{"role": "user", "content": "more"}, {"role": "assistant", "content": "a"}]
    played = replace(item("a", level=0, messages=messages), messages=messages[:1])
    assert [score.reward for score in asyncio.run(reward.score([played]))] == [1.0]


@pytest.mark.outside
def test_verifiers_rubrics_that_compare_groups_work():
    pytest.importorskip("verifiers.rubrics.rubric")
    reward = make("rubric_of_groups")
    assert (reward.scores, reward.pool) == ("groups", "process")
    assert [score.reward for score in reward.score([item("aaa"), item("b"), item("cc")])] == [0.0, 1.0, 0.0]
