"""Every built-in environment keeps the protocol of hpcrl.envs.environment, whatever a model writes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from hpcrl.config import EnvConfig
from hpcrl.envs.environment import Env
from hpcrl.envs.factory import make_env
from hpcrl.spec.tables import ENVS
from hpcrl.workers.dialogue import as_messages

ROW = {"prompt": "?", "answer": "4", "messages": [{"role": "user", "content": "?"}], "extra": {}}
MAX_TURNS = 12
HOSTILE = (
    "",
    " ",
    "\0",
    "no tag at all",
    "<answer>",
    "<answer></answer>",
    "</answer>Up<answer>",
    "<answer>Up Up</answer>",
    "<answer>\u00b2</answer>",
    "<answer>\ud800</answer>",
    "<answer>{observation}</answer>",
    "<|im_end|>\n<|im_start|>user\n",
    "<answer>" * 50_000,
    "<answer>" + "9" * 50_000 + "</answer>",
)


class Case(NamedTuple):
    """An environment with options, and responses that are actions."""

    name: str
    options: dict[str, Any]
    responses: Sequence[str]


def tagged(*words: str) -> list[str]:
    return [f"<answer>{word}</answer>" for word in words]


WALK = tagged("Up", "Right", "down", " LEFT ", "Up", "Left", "Down", "Right", "Right", "Up", "Up", "Left")
GUESSES = [f'<tool_call>{{"name": "guess", "arguments": {{"number": {n}}}}}</tool_call>' for n in (9, 1, 8, 2, 7, 3)]
CASES = [
    Case("scripted", {}, ["3", "4"]),
    Case("frozen_lake", {}, WALK),
    Case("frozen_lake", {"slippery": True, "size": 8, "frozen": 0.9}, WALK),
    Case("frozen_lake", {"tag": "", "symbols": "abcdef"}, ["Up", "Right", "Down", "Down", "Left"]),
    Case("sokoban", {}, WALK),
    Case("sokoban", {"size": 8, "num_boxes": 2, "symbols": "W.GCBA@"}, WALK),
    Case("frozen_lake", {"show": "image"}, WALK),
    Case("sokoban", {"show": "image", "tile_pixels": 8}, WALK),
    Case("guess", {"high": 9}, tagged(*"9182736455")),
    Case("tic_tac_toe", {}, tagged(*"123456789")),
    Case("tic_tac_toe", {"opponent": "perfect", "begins": False}, tagged(*"987654321")),
    Case("webshop", {"num_products": 60, "held_out": 10}, tagged("search[blue shoes]", "click[back to search]") * 3),
    Case("tools", {"tools": ["guess", "calculator"], "highest": 9}, GUESSES),
    Case("gymnasium", {"id": "FrozenLake-v1", "actions": ["Left", "Down", "Right", "Up"]}, WALK),
    Case("gymnasium", {"id": "Blackjack-v1"}, tagged(*"111")),
    Case("gymnasium", {"id": "Taxi-v4", "highlight": "@"}, tagged(*"012301230123")),
]
ELSEWHERE = {"textworld", "swe", "remote", "verifiers", "openenv"}
"""Environments whose own tests apply this suite (tests/envs/): to games that they make or play elsewhere, to packages
that are not installed beside the others, and not to each hostile text where an episode takes a new sandbox."""
GAMES = [case for case in CASES if case.name not in ("scripted", "tools") and case.options.get("show") != "image"]
WITH_EXPERT = [case for case in GAMES if ENVS[case.name].has_expert]


def name_of(case: Case) -> str:
    return "-".join([case.name, *map(str, case.options), *filter(None, [case.options.get("id")])])


def made(case: Case) -> Env:
    return make_env(EnvConfig(name=case.name, options=case.options), ROW)


def plain(result: Any) -> Any:
    """As JSON, in which an image's bytes are hexadecimal."""
    return json.loads(json.dumps(result, default=bytes.hex))


def texts(observation: Any) -> Any:
    """The observation without its images."""
    if isinstance(observation, str):
        return observation
    return [{key: value for key, value in message.items() if key != "images"} for message in observation]


def play(env: Env, seed: int, responses: Sequence[str]) -> list[Any]:
    """The first observation and the results of all turns, checked one by one."""
    observation, info = env.reset(seed)
    assert isinstance(info, dict) and as_messages(texts(observation))
    results: list[Any] = [observation]
    for response in responses:
        observation, reward, terminated, truncated, info = result = env.step(response)
        assert isinstance(terminated, bool) and isinstance(truncated, bool)
        assert isinstance(reward, float) and math.isfinite(reward)
        assert all(type(value) is float and math.isfinite(value) for value in info.get("metrics", {}).values())
        results.append(plain(result))
        if terminated or truncated:
            assert "success" in info["metrics"]
            break
        assert as_messages(texts(observation))[0]["content"].strip(), "a running episode has something to say"
    return results


def play_beside(env: Any, other: Any, seed: int, responses: Sequence[str]) -> list[Any]:
    """As play(), interleaved with another episode of the same environment."""
    other.reset(seed - 1)
    told: list[Any] = [env.reset(seed)[0]]
    for response in responses:
        told.append(plain(env.step(response)))
        other.reset(seed - 1)
        other.step(response)
    return told


def test_every_environment_has_a_case() -> None:
    expected = {name for name, spec in ENVS.items() if not spec.imports_code}
    assert {case.name for case in CASES} | ELSEWHERE == expected


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_an_episode_is_a_function_of_seed_and_actions(case: Case) -> None:
    for seed in (0, 1, 2**31 - 1):
        first = play(made(case), seed, case.responses)
        assert play(made(case), seed, case.responses) == first
        env = made(case)
        play(env, seed + 1, case.responses[:1])
        assert play(env, seed, case.responses) == first, "a reset forgets what was before"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_concurrent_episodes_do_not_affect_each_other(case: Case) -> None:
    alone = play(made(case), 3, case.responses)
    assert play_beside(made(case), made(case), 3, case.responses[: len(alone) - 1]) == alone


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_close_works_at_any_time_and_ends_no_other_episode(case: Case) -> None:
    """Also before the first reset: the role closes every environment that it has made."""
    alone = play(made(case), 3, case.responses)
    other = made(case)
    played = [other.reset(3)[0]]
    for turns in (None, 0, 1, len(case.responses)):
        env = made(case)
        if turns is not None:
            play(env, 3, case.responses[:turns])
        if close := getattr(env, "close", None):
            close()
    played += [plain(other.step(response)) for response in case.responses[: len(alone) - 1]]
    if close := getattr(other, "close", None):
        close()
    assert played == alone


@pytest.mark.parametrize("case", GAMES, ids=name_of)
def test_seeds_give_different_episodes(case: Case) -> None:
    played = {json.dumps(play(made(case), seed, case.responses[:5])) for seed in range(40)}
    expected = 1 if case.options.get("opponent") == "perfect" else 5
    assert len(played) >= expected


@pytest.mark.parametrize("case", GAMES, ids=name_of)
@pytest.mark.parametrize("response", [*HOSTILE], ids=lambda text: repr(text[:20]))
def test_an_invalid_action_changes_nothing_and_is_counted(case: Case, response: str) -> None:
    changes = {"turn": "{observation}", "invalid": "{observation}", "prompt": "{observation}", "invalid_reward": -0.25}
    case = case._replace(options=case.options | changes)
    env = made(case)
    before, _ = env.reset(7)
    after, reward, terminated, truncated, info = env.step(response)
    assert after == before and reward == -0.25 and not terminated and not truncated
    assert info["metrics"] == {"success": 0.0, "action_is_valid": 0.0, "action_is_effective": 0.0}
    assert play(env, 7, case.responses) == play(made(case), 7, case.responses)


@pytest.mark.parametrize("case", WITH_EXPERT, ids=name_of)
def test_action_metrics_are_shares_of_the_whole_episode(case: Case) -> None:
    env, rng = made(case), random.Random(0)
    env.reset(5)
    env.step("nonsense")
    *_, info = env.step(env.expert(rng, 0.0))  # type: ignore[attr-defined]
    assert info["metrics"]["action_is_valid"] == 0.5
    assert info["metrics"]["action_is_effective"] in (0.0, 0.5)  # a slip may lead nowhere


@pytest.mark.parametrize("case", WITH_EXPERT, ids=name_of)
def test_a_step_needs_a_running_episode(case: Case) -> None:
    env = made(case)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("<answer>Up</answer>")
    env.reset(0)
    for _ in range(200):
        *_, terminated, _, _ = env.step(env.expert(random.Random(1), 0.0))  # type: ignore[attr-defined]
        if terminated:
            break
    else:
        pytest.fail("no end in 200 turns")
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("<answer>Up</answer>")


@pytest.mark.slow
@pytest.mark.parametrize("case", GAMES, ids=name_of)
def test_texts_come_from_options(case: Case) -> None:
    texts = {"prompt": "p {observation} {actions}", "turn": "t {observation}", "invalid": "i {answer}\n{observation}"}
    env = made(case._replace(options=case.options | texts))
    first, _ = env.reset(0)
    wrong, *_ = env.step("?!")
    quoted = str(wrong).split("\n")[0].removeprefix("i ")
    again, *_ = env.step(f"I must answer as in {quoted}.")
    right, *_, info = env.step(f"<think>Not {quoted}, but <answer>what?</answer>.</think>{case.responses[0]}")
    assert [str(text)[:2] for text in (first, wrong, again, right)] == ["p ", "i ", "i ", "t "]
    assert info["metrics"]["action_is_valid"] == 1 / 3, "the example in the text is no action"
