"""Turn rewards in a batch: their positions, and how they follow their rows."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

import hpcrl.rollout.batch as batch_module
from hpcrl.rollout.batch import Batch, concat, on_policy, pack
from hpcrl.rollout.types import TOKEN_REWARD
from hpcrl.spec.trajectory import FIELDS, TEXT, Origin

TURNS = [[-1, 0, 0, 0, 1, 1], [-1, -1, 0], [-1, -1], [-1, 0, 0, 1, 1, 2]]
WRITTEN = [[0, 1, 1, 0, 1, 1], [0, 0, 1], [0, 0], [0, 1, 0, 1, 0, 1]]
GIVEN = [[0.5, 2.0], [], [], [1.0]]
"""The second row leaves it to its reward, the third has no turn, the fourth says nothing of its later turns."""


def make_batch(given: list[list[float]] | None = GIVEN, of_tokens: list[dict[int, float]] | None = None) -> Batch:
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
    tokens = of_tokens and [np.array(list(row.items()), dtype=TOKEN_REWARD) for row in of_tokens]
    return pack(range(4), lengths, columns, {"messages": list("abcd")}, given, tokens).check()


def test_every_declared_field_has_a_type_for_mypy() -> None:
    (block,) = (
        node
        for node in ast.walk(ast.parse(Path(batch_module.__file__).read_text()))
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "TYPE_CHECKING"
        and isinstance(node.body[0], ast.AnnAssign)
    )
    typed = {ast.unparse(line.target): ast.unparse(line.annotation) for line in block.body}
    always = (Origin.GENERATOR, Origin.SCORER, Origin.PACKING)
    assert typed == {
        field.name: "Tensor" if field.origin in always and not field.optional else "Tensor | None"
        for field in FIELDS.values()
        if field.dtype != TEXT
    }


def test_missing_turn_rewards_are_filled_up() -> None:
    batch = make_batch()
    assert batch.cu_turns.tolist() == [0, 2, 3, 3, 6]
    assert batch.turn_rewards.tolist() == [0.5, 2.0, 4.0, 1.0, 0.0, 0.0]
    assert make_batch(None).turn_rewards is None and make_batch(None).token_rewards is None


@pytest.mark.parametrize(
    ("of_tokens", "places"),
    [
        (None, {(0, 2): 0.5, (0, 5): 2.0, (1, 2): 4.0, (3, 1): 1.0}),
        # Positions count what the model wrote: row 0 has tokens 1, 2, 4 and 5, of which 4 and 5 are its second turn.
        (
            [{0: 0.25, 1: 0.25, 2: 3.0}, {}, {}, {0: 0.5, 1: -1.5, 2: 7.0}],
            {(0, 1): 0.25, (0, 2): 0.25, (0, 4): 3.0, (0, 5): -1.0, (1, 2): 4.0}
            | {(3, 1): 1.0, (3, 3): 0.0, (3, 5): 0.0},
        ),
    ],
)
def test_the_rest_of_a_turns_reward_is_added_to_its_last_token(
    of_tokens: list[dict[int, float]] | None, places: dict[tuple[int, int], float]
) -> None:
    batch = make_batch(GIVEN, of_tokens)
    starts = batch.cu_seqlens.tolist()
    placed = {starts[row] + token: reward for (row, token), reward in places.items()}
    assert batch.token_rewards.tolist() == [placed.get(token, 0.0) for token in range(batch.num_tokens)]
    sums = [float(row.sum()) for row in batch.token_rewards.split(batch.lengths.tolist())]
    assert sums == [float(row.sum()) for row in batch.turn_rewards.split(batch.cu_turns.diff().tolist())]


def test_token_rewards_that_sum_to_their_turn_leave_no_remainder() -> None:
    values = np.random.default_rng(0).normal(size=2).astype(np.float32).tolist()
    batch = make_batch([[0.0, sum(values)], [0.0], [], [1.0]], [{2: values[0], 3: values[1]}, {}, {}, {}])
    assert batch.token_rewards[4:6].tolist() == values


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


@pytest.mark.parametrize(
    ("recomputed", "expected"),
    [
        (False, [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
        (True, [0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_tokens_are_on_policy_only_if_their_cache_is_too(recomputed: bool, expected: list[int]) -> None:
    """The first row continues when weights 5 arrive; the last one is older."""
    batch = make_batch()
    batch.versions = torch.tensor([-1, 4, 4, -1, 5, 5, -1, -1, 5, -1, -1, -1, 4, -1, 4, -1, 4]).int()
    assert on_policy(batch, 5, recomputed).tolist() == [bool(value) for value in expected]
    assert not on_policy(batch, 6, recomputed).any()
