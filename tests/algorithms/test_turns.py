"""Advantages of turns, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import Outputs, RewardTable
from hpcrl.algorithms.spec import GAE, GRPO, GiGPO, Reinforce, TurnGAE, TurnReinforce
from hpcrl.algorithms.turns import turn_states
from hpcrl.config import ConfigError, parse
from hpcrl.rollout.batch import Batch, Norms, batch_from_samples, concat, place_rewards
from hpcrl.rollout.types import FinishReason, Sample
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import advantages, make_batch
from tests.engines.worlds import by_steps
from tests.engines.worlds import make_batch as random_rows

START, LAKE, WALL = [7, 8, 9], [5, 1], [5, 2]
EPISODES = [  # observations, rewards of turns; every turn of the model has two tokens
    ([START, LAKE, WALL], [0.0, 1.0, 2.0]),
    ([START, WALL], [0.5, 0.0]),
    ([START, LAKE, LAKE], [0.0, 0.0, 4.0]),
    ([START, LAKE], [1.0, 1.0]),
]
GROUPS = [1, 1, 1, 2]


def played(rows: list[int]) -> Batch:
    """These episodes as a batch."""
    samples = []
    for row in rows:
        observations = EPISODES[row][0]
        ids, mask, turns = [], [], []
        for turn, shown in enumerate(observations):
            ids += [*shown, 100 + turn, 3]
            mask += [False] * len(shown) + [True] * 2
            turns += [turn - 1] * len(shown) + [turn] * 2
        samples.append(
            Sample(
                id=10 * row, token_ids=np.array(ids, dtype=np.int32), loss_mask=np.array(mask),
                turn_ids=np.array(turns, dtype=np.int32), gen_logprobs=np.where(mask, -1.0, 0).astype(np.float32),
                versions=np.where(mask, 3, -1).astype(np.int32), reward=sum(EPISODES[row][1]), score=0.0,
                finish_reason=FinishReason.STOP,
            )
        )  # fmt: skip
    batch = batch_from_samples(samples, [GROUPS[row] for row in rows])
    batch.turn_rewards = torch.tensor([reward for row in rows for reward in EPISODES[row][1]])
    batch.token_rewards = place_rewards(None, batch)
    return batch.check()


def stepped(rows: list[int], history: int) -> Batch:
    """The same episodes by steps: each later turn has a prompt with the start and the latest observations."""
    samples = []
    for row in rows:
        observations = EPISODES[row][0]
        ids, mask, turns, states = [], [], [], []
        for turn, shown in enumerate(observations):
            earlier = observations[max(0, turn - history) : turn]
            prompt = [token for before in earlier for token in before] + shown
            ids += [*prompt, 100 + turn, 3]
            mask += [False] * len(prompt) + [True] * 2
            turns += [-1] * len(prompt) + [turn] * 2
            states += [sum(shown)] + [0] * (len(prompt) + 1)
        samples.append(
            Sample(
                id=10 * row, token_ids=np.array(ids, dtype=np.int32), loss_mask=np.array(mask),
                turn_ids=np.array(turns, dtype=np.int32), gen_logprobs=np.where(mask, -1.0, 0).astype(np.float32),
                versions=np.where(mask, 3, -1).astype(np.int32), reward=sum(EPISODES[row][1]), score=0.0,
                finish_reason=FinishReason.STOP, states=np.array(states, dtype=np.int32),
            )
        )  # fmt: skip
    batch = batch_from_samples(samples, [GROUPS[row] for row in rows])
    batch.turn_rewards = torch.tensor([reward for row in rows for reward in EPISODES[row][1]])
    batch.token_rewards = place_rewards(None, batch)
    return batch.check()


def of_turns(batch: Batch, values: Tensor) -> list[float]:
    """The value of each turn, which all of its tokens have."""
    both = values[batch.loss_mask].view(-1, 2)
    assert torch.equal(both[:, 0], both[:, 1]) and not values[~batch.loss_mask].any()
    return both[:, 0].tolist()


def filled(section: Any) -> tuple[list[float], list[float]]:
    """(advantages, returns) of all turns."""
    batch = played([0, 1, 2, 3])
    advantages(make_pair(section), batch, RewardTable.of(batch))
    return of_turns(batch, batch.advantages), of_turns(batch, batch.returns)


def test_return_of_a_turn_sums_its_own_and_later_rewards() -> None:
    got, returns = filled(TurnReinforce(gamma=0.5, norm_mean_type=None, norm_std_type=None))
    assert got == returns == [1.0, 2.0, 2.0, 0.5, 0.0, 1.0, 2.0, 4.0, 1.5, 1.0]


def test_turns_are_normalised_over_the_batch_or_the_group() -> None:
    values = torch.tensor([1.0, 2.0, 2.0, 0.5, 0.0, 1.0, 2.0, 4.0, 1.5, 1.0])
    got, _ = filled(TurnReinforce(gamma=0.5, std_eps=0.0))
    assert got == pytest.approx(((values - values.mean()) / values.std()).tolist())
    got, _ = filled(TurnReinforce(gamma=0.5, norm_mean_type="group", norm_std_type=None))
    means = [12.5 / 8] * 8 + [1.25] * 2
    assert got == pytest.approx((values - torch.tensor(means)).tolist())


def test_turns_are_normalised_over_their_domain_or_over_all() -> None:
    """Returns 1, 2, 2, .5, 0, 1, 2, 4 of the domain lake and 1.5, 1 of the other."""
    lake, other = 12.5 / 8, 1.25
    for choice, means in ("batch", [lake] * 8 + [other] * 2), ("all", [1.5] * 10):
        batch = played([0, 1, 2, 3])
        table = replace(RewardTable.of(batch), domains={"lake": [1], "other": [2]})
        config = TurnReinforce(gamma=0.5, norm_mean_type=choice, norm_std_type=None)
        advantages(make_pair(config), batch, table)
        expected = [x - mean for x, mean in zip([1, 2, 2, 0.5, 0, 1, 2, 4, 1.5, 1], means, strict=True)]
        assert of_turns(batch, batch.advantages) == pytest.approx(expected, abs=1e-6)


def test_gigpo_compares_turns_that_began_in_the_same_state() -> None:
    """In the first group START has the returns 3, .5, 4, LAKE 3, 4, 4 and WALL 2, 0; in the other group no state occurs
    twice."""
    got, returns = filled(GiGPO(gamma=1.0, std_normalize=False, step_weight=2.0))
    assert returns == [3.0, 3.0, 2.0, 0.5, 0.0, 4.0, 4.0, 4.0, 2.0, 1.0]
    start, lake, wall = 2.5, 11 / 3, 1.0
    steps = [3 - start, 3 - lake, 2 - wall, 0.5 - start, 0 - wall, 4 - start, 4 - lake, 4 - lake, 0.0, 0.0]
    episodes = [0.5] * 3 + [-2.0] * 2 + [1.5] * 3 + [0.0] * 2
    assert got == pytest.approx([e + 2 * s for e, s in zip(episodes, steps, strict=True)], abs=1e-6)
    whole, _ = filled(GiGPO(gamma=1.0, std_normalize=False, step_weight=0.0))
    assert whole == pytest.approx(episodes)
    scaled, _ = filled(GiGPO(gamma=1.0, std_eps=0.0))
    third, spread = (4 - start) / torch.tensor([3.0, 0.5, 4.0]).std(), torch.tensor([3.0, 0.5, 4.0]).std()
    assert scaled[5] == pytest.approx(float(1.5 / spread + third))


def test_state_before_a_turn_is_the_observation_shown_before_it() -> None:
    batch = played([0, 1, 2, 3])
    first, second, third, fourth = turn_states(batch).split([3, 2, 3, 2])
    assert first[0] == second[0] == third[0] == fourth[0]
    assert first[1] == third[1] == third[2] == fourth[1] and first[2] == second[1]
    assert len({int(state) for state in torch.cat([first, second])}) == 3
    alone = played([1])
    assert torch.equal(turn_states(alone), second), "where a row stands in the batch does not matter"
    alone.token_ids[1], alone.token_ids[0] = alone.token_ids[0].clone(), alone.token_ids[1].clone()
    assert turn_states(alone)[0] != second[0], "the order of the tokens matters"


@pytest.mark.parametrize("history", [0, 1, 9])
def test_a_turn_by_steps_has_the_state_that_was_shown_last(history: int) -> None:
    batch = stepped([3, 0, 1], history)
    start, lake, wall = 24, 6, 7
    assert turn_states(batch).tolist() == [start, lake, start, lake, wall, start, wall]
    assert batch.segment_lengths.tolist()[:2] == [5, 4 + 3 * (history > 0)]
    assert batch.position_ids.tolist() == [n for length in batch.segment_lengths for n in range(length)]


def test_rows_by_trajectory_keep_their_states_in_a_batch_with_rows_by_steps() -> None:
    long, short = played([0]), stepped([1], 0)
    alone = turn_states(long)
    long.states = torch.zeros(long.num_tokens, dtype=torch.int32)
    assert torch.equal(turn_states(concat([short, long])), torch.cat([turn_states(short), alone]))


@pytest.mark.parametrize(
    "section",
    [
        TurnReinforce(gamma=0.5, std_eps=0.0),
        GiGPO(gamma=0.9, step_weight=2.0),
        GRPO(),
        GAE(gamma=0.9, lambd=0.8),
        TurnGAE(gamma=0.9, lambd=0.8, turn_gamma=0.7),
    ],
    ids=str,
)
@pytest.mark.parametrize("history", [0, 9])
def test_advantages_by_trajectory_and_by_steps_agree(section: Any, history: int) -> None:
    """Model tokens get the same values by trajectory and by steps; only the prompts differ."""
    found = []
    for batch in (played([0, 1, 2, 3]), stepped([0, 1, 2, 3], history)):
        batch.values = torch.zeros(batch.num_tokens)
        batch.values[batch.loss_mask] = torch.linspace(-1, 1, int(batch.loss_mask.sum()))
        advantages(make_pair(section), batch, RewardTable.of(batch))
        assert not batch.advantages[~batch.loss_mask].any()
        found.append((batch.advantages[batch.loss_mask], batch.returns[batch.loss_mask]))
    torch.testing.assert_close(found[0], found[1])
    assert found[0][0].abs().max() > 0.1


@pytest.mark.parametrize("level", ["token", "turn", "geometric", "sequence"])
def test_each_step_is_a_separate_sequence_in_ratios(level: str) -> None:
    """The loss of episodes by steps equals that of their steps as separate rows; the mean over tokens ignores rows."""
    rows = random_rows((9, 12, 5, 14), seed=1)
    config = GRPO(
        ratio_level=level, loss_aggregation="token-mean", ppo_epochs=2, correction="mask",
        correction_level=level, correction_low=0.2, correction_high=3.0,
    )  # fmt: skip
    noise = torch.Generator().manual_seed(2)
    drawn = {name: torch.randn(rows.num_tokens, generator=noise) for name in ("old", "now", "gen", "advantages")}
    rows.old_logprobs, rows.gen_logprobs = (0.3 * drawn[name] * rows.loss_mask for name in ("old", "gen"))
    rows.advantages = drawn["advantages"] * rows.loss_mask
    losses = []
    for batch in (rows, by_steps(rows, (1, 3)), by_steps(rows, (4,))):
        outputs = Outputs(0.3 * drawn["now"] * batch.loss_mask)
        losses.append(float(make_pair(config).objective.loss(outputs, batch, Norms(30.0, 4.0))[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) == pytest.approx(losses[2], rel=1e-5)


def test_single_turn_advantages_equal_reinforce() -> None:
    masks, rewards = [[0, 1, 1], [0, 0, 1], [0, 0, 0], [0, 1]], [1.0, 0.0, 5.0, 3.0]
    turns, table = make_batch(masks, rewards, [1, 1, 2, 2])
    advantages(make_pair(TurnReinforce(norm_mean_type="group", norm_std_type=None)), turns, table)
    assert turns.advantages.tolist() == pytest.approx([0, 0.5, 0.5, 0, 0, -0.5, 0, 0, 0, 0, 0.0])
    whole, table = make_batch(masks[:2] + masks[3:], [1.0, 0.0, 3.0], [1, 1, 2])
    advantages(make_pair(Reinforce(norm_mean_type="batch", norm_std_type="batch")), whole, table)
    turns, table = make_batch(masks[:2] + masks[3:], [1.0, 0.0, 3.0], [1, 1, 2])
    advantages(make_pair(TurnReinforce()), turns, table)
    torch.testing.assert_close(turns.advantages, whole.advantages)


@pytest.mark.parametrize("key", [{"kl_reward_coef": 0.1}, {"whiten_rewards": True}], ids=str)
def test_token_level_keys_are_refused(key: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.{next(iter(key))}: .* acts on token rewards, and gigpo has"):
        parse({"algorithm": {"advantage_estimator": "gigpo", **key}})
