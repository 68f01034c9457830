"""Turn and token rewards: permitted values, and the examples of docs/rewards.md."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.config import RewardConfig
from hpcrl.rewards.function import FunctionReward
from hpcrl.rewards.reward import ModelTurn, Reward, RewardItem, Score
from hpcrl.rewards.serving.guarded import describe, score_each
from hpcrl.rewards.serving.protocol import LENGTH, pack_chunk, read_chunk, to_message
from hpcrl.rollout.batch import pack
from hpcrl.rollout.types import TOKEN_REWARD

DOCUMENT = Path(__file__).parents[2] / "docs" / "rewards.md"
EPISODE = RewardItem(1, "d", "p", "b", "b", {}, "stop", (5, 6), (ModelTurn("a", (7, 8, 9)),))
"""Two turns of the model, of three tokens and of two."""


class Given(Reward):
    """Returns the score it is made with."""

    def __init__(self, score: Score):
        self._score = score

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self._score] * len(items)


def given(reward: float, turns: Any = (), tokens: Any = None) -> Score:
    """The pool's result for a reward's score."""
    made = Score(reward, 1.0, turn_rewards=turns, token_rewards={} if tokens is None else tokens)
    [score] = score_each(Given(made), [EPISODE]) or []
    return score


@pytest.mark.parametrize(
    ("reward", "turns", "tokens", "expected"),
    [
        (1.0, (), {}, ()),
        (0.75, [1, -0.25], {}, (1.0, -0.25)),
        (0.0, np.array([0.5, -0.5], dtype=np.float32), {}, (0.5, -0.5)),
        (0.3, (0.1, 0.2), {}, (0.1, 0.2)),  # whose sum is not .3 in binary
        (20.0000401, (), dict.fromkeys(range(5), 4.0), (12.0, 8.0)),  # a running sum in float32
        (1.0, (), {0: 0.25, 2: 0.5, 4: 0.25}, (0.75, 0.25)),
        (-1.0, (), {np.int64(3): np.float32(-1)}, (0.0, -1.0)),
        (0.0, (0.0, 0.0), {}, (0.0, 0.0)),
    ],
)
def test_turn_or_token_rewards_that_add_up_are_accepted(
    reward: float, turns: Any, tokens: Mapping[int, float], expected: tuple[float, ...]
) -> None:
    score = given(reward, turns, tokens)
    assert (score.error, score.reward, score.score) == ("", reward, 1.0)
    assert score.turn_rewards == expected and score.token_rewards == {int(k): float(v) for k, v in tokens.items()}


@pytest.mark.parametrize(
    ("reward", "turns", "tokens", "error"),
    [
        (1.0, [1.0], {}, "the reward gave 1 turn_rewards for 2 model turns"),
        (1.0, [1.0, 0.5], {}, "the turn_rewards add up to 1.5, but the reward is 1"),
        (0.0, [1e6, -1e6 + 300], {}, "the turn_rewards add up to 300, but the reward is 0"),
        (1.0, [math.nan, 1.0], {}, "the reward gave turn_rewards that are not finite"),
        (1.0, ["much", 1.0], {}, "ValueError: could not convert string to float: 'much'"),
        (1.0, 1.0, {}, "TypeError: 'float' object is not iterable"),
        (1.0, (), {5: 1.0}, "the reward gave token_rewards[5], but the response has 5 model tokens here"),
        (1.0, (), {-1: 1.0}, "the reward gave token_rewards[-1], but the response has 5 model tokens here"),
        (1.0, (), {0: math.inf}, "the reward gave token_rewards that are not finite"),
        (0.0, (), {0: 1e39, 1: -1e39}, "the reward gave token_rewards above 1e+30"),
        (-1e300, (), {}, "the reward returned -1e+300, but at most 1e+30 is allowed"),
        (1.0, (), {0: 0.5, 4: 0.25}, "the token_rewards add up to 0.75, but the reward is 1"),
        (1.0, (), [0.5, 0.5], "AttributeError: 'list' object has no attribute 'items'"),
        (1.0, (), dict.fromkeys(range(257), 1 / 257), "the reward gave 257 token_rewards, but a response can have 256"),
        (1.0, [1.0, 0.0], {0: 1.0}, "the reward gave turn_rewards and token_rewards, but a response can have only one"),
    ],
)
def test_rewards_that_do_not_add_up_are_sample_errors(reward: float, turns: Any, tokens: Any, error: str) -> None:
    assert given(reward, turns, tokens) == Score(0.0, 0.0, error)


def test_turns_reach_a_reward_worker() -> None:
    (again,) = read_chunk(pack_chunk([EPISODE], [to_message(EPISODE)])[LENGTH.size :])
    assert [(turn.text, list(turn.token_ids)) for turn in again.turns] == [("a", [7, 8, 9]), ("b", [5, 6])]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the examples of the document that belong together."""
    section = DOCUMENT.read_text().partition("### Rewards of turns and tokens")[2].partition("\n### ")[0]
    path = tmp_path_factory.mktemp("examples") / "examples.py"
    path.write_text("\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)))
    return path


def scored(path: Path, name: str, item: RewardItem, **options: Any) -> Score:
    reward = FunctionReward(RewardConfig(name="function", function=f"{path}:{name}", options=options))
    [score] = score_each(reward, [item]) or []
    return score


def test_the_documented_turn_rewards_work(written: Path) -> None:
    long = RewardItem(1, "d", "p", " 4 ", "4", earlier=(ModelTurn("x" * 101), ModelTurn("y" * 100)))
    assert scored(written, "concise", long) == Score(0.75, 1.0, turn_rewards=(-0.25, 0.0, 1.0))
    wrong = RewardItem(1, "d", "p", "5", "4")
    assert scored(written, "concise", wrong) == Score(0.0, 0.0, turn_rewards=(0.0,))


def test_the_documented_token_rewards_and_their_estimator_work(written: Path) -> None:
    item = RewardItem(1, "d", "p", "a\nb\n4", "4", {}, "stop", (1, 198, 2, 198, 3))
    score = scored(written, "steps", item)
    assert score == Score(0.75, 1.0, turn_rewards=(0.75,), token_rewards={1: -0.125, 3: -0.125, 4: 1.0})
    tokens = np.array(list(score.token_rewards.items()), dtype=TOKEN_REWARD)
    columns = {
        "token_ids": np.array([9, 9, 1, 198, 2, 198, 3]),
        "loss_mask": np.arange(7) > 1,
        "gen_logprobs": np.zeros(7),
        "versions": np.zeros(7),
        "turn_ids": np.where(np.arange(7) > 1, 0, -1),
        "status": np.zeros(1),
        "rewards": np.array([score.reward]),
        "scores": np.array([score.score]),
    }
    batch = pack([1], [7], columns, turn_rewards=[score.turn_rewards], token_rewards=[tokens]).check()
    names: dict[str, Any] = {}
    exec(written.read_text(), names)
    names["StepAdvantage"](None).assign(batch, None, lambda tensor: tensor)
    assert batch.advantages.tolist() == [0, 0, 0.75, 0.75, 0.875, 0.875, 1]
    assert torch.equal(batch.returns, batch.advantages)
    batch.token_rewards = None
    with pytest.raises(ValueError, match=r"batch\.token_rewards must be filled for advantages of steps"):
        names["StepAdvantage"](None).assign(batch, None, lambda tensor: tensor)


class Raising(Reward):
    """Raises an error that cannot be serialised."""

    def __init__(self, error: Exception):
        self._error = error

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        raise self._error


class Mute(ValueError):
    def __str__(self) -> str:
        raise TypeError


def test_an_error_in_a_library_is_located_at_the_users_call() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert re.fullmatch(r"JSONDecodeError: Expecting .* \(test_parts\.py:\d+\)", describe(caught.value))
    with pytest.raises(ValueError) as caught:
        FunctionReward(RewardConfig(name="function", function="no.such:function"))
    assert describe(caught.value).endswith(f"{caught.value}"), "hpcrl's own errors say what is wrong"


def test_unserialisable_errors_and_metrics_are_made_serialisable() -> None:
    for error, said in ((ValueError(chr(0xD800)), "ValueError: ?"), (Mute(), "Mute: its message cannot be read")):
        [score] = score_each(Raising(error), [EPISODE]) or []
        assert re.fullmatch(rf"{re.escape(said)} \(test_parts\.py:\d+\)", score.error), score.error
    [score] = score_each(Given(Score(1.0, 1.0, metrics={chr(0xD800): 2.0})), [EPISODE]) or []
    assert score.metrics == {"?": 2.0}
