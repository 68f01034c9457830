"""Rewards of turns in a batch: where they stand, and how they follow their rows."""

from __future__ import annotations

import numpy as np
import pytest

from hpcrl.rollout.batch import Batch, concat, pack

TURNS = [[-1, 0, 0, 0, 1, 1], [-1, -1, 0], [-1, -1], [-1, 0, 0, 1, 1, 2]]
WRITTEN = [[0, 1, 1, 0, 1, 1], [0, 0, 1], [0, 0], [0, 1, 0, 1, 0, 1]]
GIVEN = [[0.5, 2.0], [], [], [1.0]]
"""The second row leaves it to its reward, the third has no turn, the fourth says nothing of its later turns."""


def make_batch(given: list[list[float]] | None = GIVEN) -> Batch:
    lengths = [len(turns) for turns in TURNS]
    total = sum(lengths)
    columns = {
        "token_ids": np.arange(total),
        "loss_mask": np.concatenate(WRITTEN),
        "gen_logprobs": np.zeros(total),
        "versions": np.zeros(total),
        "turn_ids": np.concatenate(TURNS),
        "status": np.zeros(4),
        "rewards": np.array([2.5, 4.0, 8.0, 1.0]),
        "scores": np.zeros(4),
    }
    return pack(range(4), lengths, columns, {"messages": list("abcd")}, turn_rewards=given).check()


def test_rewards_of_turns_are_filled_up() -> None:
    batch = make_batch()
    assert batch.cu_turns.tolist() == [0, 2, 3, 3, 6]
    assert batch.turn_rewards.tolist() == [0.5, 2.0, 4.0, 1.0, 0.0, 0.0]
    assert make_batch(None).turn_rewards is None


@pytest.mark.parametrize(
    ("given", "places"),
    [
        (GIVEN, {(0, 2): 0.5, (0, 5): 2.0, (1, 2): 4.0, (3, 1): 1.0}),
        (None, {(0, 5): 2.5, (1, 2): 4.0, (3, 5): 1.0}),
    ],
)
def test_the_reward_of_a_turn_stands_at_its_last_token(
    given: list[list[float]] | None, places: dict[tuple[int, int], float]
) -> None:
    batch = make_batch(given)
    starts = batch.cu_seqlens.tolist()
    placed = {starts[row] + token: reward for (row, token), reward in places.items()}
    assert batch.token_rewards().tolist() == [placed.get(token, 0.0) for token in range(batch.num_tokens)]


def test_fields_of_turns_and_texts_follow_their_rows() -> None:
    batch = make_batch()
    chosen = batch.select([3, 0, 2])
    assert chosen.turn_rewards.tolist() == [1.0, 0.0, 0.0, 0.5, 2.0] and chosen.texts == {"messages": list("dac")}
    joined = concat([batch.select([1]), chosen]).check()
    assert joined.turn_rewards.tolist() == [4.0, 1.0, 0.0, 0.0, 0.5, 2.0] and joined.texts == {"messages": list("bdac")}
    assert joined.cu_turns.tolist() == [0, 1, 4, 6, 6]
    assert batch.select([]).turn_rewards.numel() == 0
    wrong = Batch(batch.cu_seqlens, {**batch.columns, "turn_rewards": batch.turn_rewards[:5]})
    with pytest.raises(ValueError, match=r"batch\.turn_rewards must be torch\.float32 \[6\], got torch\.float32 \[5\]"):
        wrong.check()
    with pytest.raises(ValueError, match="messages is present in some of the batches"):
        concat([batch, Batch(batch.cu_seqlens, batch.columns)])
