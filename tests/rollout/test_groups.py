"""A scorer's rewards are added to the environment's, turn by turn."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from hpcrl.rollout.scheduling.events import DoneSample, Rewarded
from hpcrl.rollout.scheduling.groups import LiveGroup, Start, with_score
from hpcrl.rollout.types import TOKEN_REWARD, FinishReason

NAN = math.nan


@pytest.mark.parametrize(
    ("played", "scored", "reward", "turns"),
    [
        ((0.0, ()), (1.0, ()), 1.0, ()),  # one response: all of it is the last turn's
        ((0.0, ()), (1.0, (0.25, 0.75)), 1.0, (0.25, 0.75)),
        ((0.5, (0.0, 0.5)), (1.0, ()), 1.5, (0.0, 1.5)),  # on top of an episode: at its end
        ((0.5, (0.0, 0.5)), (1.0, (1.0,)), 1.5, (1.0, 0.5)),
        ((0.5, (0.0, 0.5)), (NAN, ()), 0.0, ()),
        ((0.0, ()), (1.0, (NAN, 1.0)), 0.0, ()),
    ],
)
def test_turn_rewards_of_environment_and_scorer_add_up(
    played: tuple[float, tuple[float, ...]],
    scored: tuple[float, tuple[float, ...]],
    reward: float,
    turns: tuple[float, ...],
) -> None:
    done = DoneSample(1, 0, 4, FinishReason.STOP, played[0], 0.0, turn_rewards=played[1])
    result = with_score(done, Rewarded(1, scored[0], 0.5, turn_rewards=scored[1]))
    assert (result.reward, result.turn_rewards) == (reward, turns)
    assert bool(result.error) == any(math.isnan(number) for number in (scored[0], *scored[1]))


def test_a_pending_group_keeps_its_turn_and_token_rewards_in_a_checkpoint() -> None:
    group = LiveGroup(Start(3, 1), version=2, size=2, keep=2)
    tokens = np.array([(0, 0.5), (7, -0.25)], dtype=TOKEN_REWARD).tobytes()
    for sample, event in zip(
        group.samples, (Rewarded(1, 0.25, 1.0, "", (0.5, -0.25), tokens), Rewarded(2, 1.0, 1.0)), strict=True
    ):
        sample.done = with_score(DoneSample(sample.id, 4, 9, FinishReason.STOP, 0.0, 0.0), event)
    again = LiveGroup.restored(json.loads(json.dumps(group.saved())), [4])
    assert again.frozen() == group.frozen()
    assert [sample.done.token_rewards for sample in again.samples] == [tokens, b""]
    old = group.saved()  # as written before token rewards existed
    for sample in old["samples"]:
        del sample["token_rewards"]
    assert LiveGroup.restored(old, [4]).samples[0].done.turn_rewards == (0.5, -0.25)


def test_a_non_finite_reward_drops_all_of_its_parts() -> None:
    done = DoneSample(1, 0, 4, FinishReason.STOP, math.inf, 0.0)
    result = with_score(done, Rewarded(1, 1.0, 1.0, "", (1.0,), bytes(8)))
    assert result.error and (result.turn_rewards, result.token_rewards) == ((), b"")
    large = with_score(replace(done, reward=8e29), Rewarded(1, 8e29, 1.0))
    assert large.reward == 0 and large.error == "reward 1.6e+30 and score 1.0 are not both finite and below 1e+30"
