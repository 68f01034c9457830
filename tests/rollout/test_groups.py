"""What a scorer gives is added to what an environment gave, turn by turn."""

from __future__ import annotations

import math

import pytest

from hpcrl.rollout.events import DoneSample, Scored
from hpcrl.rollout.groups import with_score
from hpcrl.rollout.types import FinishReason

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
def test_rewards_of_turns_add_up(
    played: tuple[float, tuple[float, ...]],
    scored: tuple[float, tuple[float, ...]],
    reward: float,
    turns: tuple[float, ...],
) -> None:
    done = DoneSample(1, 0, 4, FinishReason.STOP, played[0], 0.0, turn_rewards=played[1])
    result = with_score(done, Scored(1, scored[0], 0.5, turn_rewards=scored[1]))
    assert (result.reward, result.turn_rewards) == (reward, turns)
    assert bool(result.error) == any(math.isnan(number) for number in (scored[0], *scored[1]))
