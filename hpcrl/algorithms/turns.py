"""The base of advantage estimators for turns: every token of a turn has the turn's advantage.

G_t = r_t + gamma G_(t+1)       r: the environment's rewards of an episode's turns; G: their returns
A_t = clip(compare(G_t))        compare: the advantage estimator's; equal for all model tokens of turn t

There are no token rewards, so kl_reward_coef and whiten_rewards are refused.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hpcrl.algorithms import functional as F
from hpcrl.algorithms.advantage_estimator import ReturnsAdvantage, clip
from hpcrl.algorithms.interface import AllSum, RewardTable
from hpcrl.algorithms.spec import TurnLoss
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.batch_images import keys_of

MAX_LOG_TURNS = 16
"""Logarithm of a number that no episode's turns reach."""
FACTOR = 6364136223846793005
"""Constant of a state's hash (D. Knuth, MMIX)."""

TurnSection = TypeVar("TurnSection", bound=TurnLoss)


@dataclass(frozen=True)
class TurnTable:
    """The turns of all ranks, in equal order on all of them.

    Attributes:
        returns: float32 [K].
        group_ids: int64 [K].
        domain_ids: int64 [K].
        episodes: int64 [K], the index of each turn's episode in the reward table.
        states: int64 [K], equal for turns before which the model saw the same tokens.
        own: int64 [n], indices of this rank's turns.
    """

    returns: Tensor
    group_ids: Tensor
    domain_ids: Tensor
    episodes: Tensor
    states: Tensor
    own: Tensor


class TurnAdvantage(ReturnsAdvantage[TurnSection]):
    """See the module's docstring."""

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsAdvantage; the rewards of whole episodes."""
        return table.rewards

    @abstractmethod
    def compare(self, turns: TurnTable, table: RewardTable) -> Tensor:
        """float32 [K]: the advantages of the turns."""

    def advantages_and_returns(
        self, batch: Batch, table: RewardTable, positions: Tensor, index: Tensor, all_sum: AllSum
    ) -> tuple[Tensor, Tensor]:
        """See ReturnsAdvantage."""
        num_turns = batch.cu_turns.diff()
        rows = torch.repeat_interleave(torch.arange(batch.num_sequences, device=num_turns.device), num_turns)
        returns = F.discounted_returns(turn_rewards(batch), rows, self.config.gamma)
        turns = _of_all_ranks(returns, rows, batch, table, positions, all_sum)
        advantages = clip(self.compare(turns, table), self.config.reward_clip)[turns.own]
        at = turns_of(batch, index)
        return advantages[at], returns[at]


def turns_of(batch: Batch, index: Tensor) -> Tensor:
    """int64 [M]: the turns, counted over the whole batch, of the model tokens `index`; sorted."""
    return batch.cu_turns[batch.row_ids[index]] + batch.turn_ids[index].long()


def turn_rewards(batch: Batch) -> Tensor:
    """float32 [n]: the rewards of turns; a whole response's reward belongs to its last turn."""
    if batch.turn_rewards is not None:
        return batch.turn_rewards
    ends = batch.cu_turns[1:]
    has_turns = batch.cu_turns.diff() > 0
    rewards = torch.zeros(int(ends[-1]) if len(ends) else 0, device=ends.device)
    rewards[ends[has_turns] - 1] = batch.rewards[has_turns]
    return rewards


def _of_all_ranks(
    returns: Tensor, rows: Tensor, batch: Batch, table: RewardTable, positions: Tensor, all_sum: AllSum
) -> TurnTable:
    """Each rank fills its own entries of a table of episodes and turns, and all ranks get the sum."""
    number = torch.arange(len(rows), device=rows.device) - batch.cu_turns[:-1][rows]
    bits = 2 ** torch.arange(MAX_LOG_TURNS, device=rows.device)
    longest = int(number.max()) + 1 if len(number) else 0
    width = int(1 << int((all_sum((longest > bits).long()) > 0).sum()))
    place, shape = (positions[rows], number), (len(table.sample_ids), width)

    def summed(values: Tensor) -> Tensor:
        return all_sum(values.new_zeros(shape).index_put(place, values))

    is_there = summed(torch.ones_like(rows)) > 0
    order = torch.cumsum(is_there.flatten(), 0).view(shape) - 1
    episode = torch.arange(shape[0], device=rows.device)[:, None].expand(shape)[is_there]
    all_returns, states = summed(returns)[is_there], summed(turn_states(batch))[is_there]
    domains = table.domain_ids()[1]
    return TurnTable(all_returns, table.group_ids[episode], domains[episode], episode, states, order[place])


def turn_states(batch: Batch) -> Tensor:
    """int64 [n]: a hash of the model's input before each turn: the prompt, or the observation after the previous turn.
    In episodes by steps it covers only the environment's latest observation, not the rest of the turn's own prompt."""
    if batch.states is None:
        return _hashes(batch, ~batch.loss_mask)
    starts, begins = batch.cu_turns, batch.states.nonzero()[:, 0]  # the prompts of each row, in turn order
    rows = batch.row_ids[begins]
    counts = torch.bincount(rows, minlength=batch.num_sequences)
    turn = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    followed = turn < starts.diff()[rows]
    states = _hashes(batch, ~batch.loss_mask & (counts == 0)[batch.row_ids])
    return states.index_copy(0, (starts[rows] + turn)[followed], batch.states[begins][followed].long())


def _hashes(batch: Batch, shown: Tensor) -> Tensor:
    """int64 [n]: a hash of the tokens and images before each turn that are marked in `shown`, bool [T]."""
    keys = batch.token_ids if batch.images is None else keys_of(batch)
    starts, at = batch.cu_turns, shown.nonzero()[:, 0]
    rows, turn = batch.row_ids[at], batch.turn_ids[at].long() + 1
    precedes = turn < starts.diff()[rows]  # else no model token follows
    tokens, at = keys[at[precedes]].long(), (starts[rows] + turn)[precedes]
    begins = torch.ones_like(at, dtype=torch.bool)
    begins[1:] = at[1:] != at[:-1]
    counter = torch.arange(len(at), device=at.device)
    offset = counter - torch.cummax(torch.where(begins, counter, 0), 0).values if len(at) else counter
    powers = torch.cumprod(torch.full((int(offset.max()) + 1 if len(at) else 0,), FACTOR, device=at.device), 0)
    states = torch.zeros(int(starts[-1]), dtype=torch.int64, device=at.device)
    return states.index_add(0, at, (tokens + 1) * powers[offset])
