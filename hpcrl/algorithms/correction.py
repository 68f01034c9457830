"""The off-policy correction of a policy loss: importance weights of tokens, and responses that are dropped.

The ratio compares the trainer's probabilities before the step with the generator's (functional.behaviour_weights).
`correction` weights or drops tokens by this ratio. With `rejection_level`, whole responses are dropped by a second
ratio with separate bounds. With `correction_normalize` the weights have mean 1 over the step; otherwise a correction
would also act as a smaller learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcrl.algorithms import functional as F
from hpcrl.algorithms.interface import AllSum, is_last, policy_tokens, required
from hpcrl.algorithms.policy_tokens import PolicyTokens
from hpcrl.rollout.batch import Batch
from hpcrl.spec.policy_loss import PolicyLoss

MIN_MEAN = 1e-8
"""Minimum mean of the weights; below it the weights are not divided by their mean."""


@dataclass(frozen=True)
class Correction:
    """The correction of M tokens: float32 [M] each, without gradients.

    Attributes:
        weights: Weights of the token losses, 0 where a token is dropped.
        clipped: 1 where `correction` changed a ratio or dropped the token.
        rejected: 1 for tokens of responses that the rejection dropped; None without a rejection.
    """

    weights: Tensor
    clipped: Tensor
    rejected: Tensor | None = None


def off_policy_tokens(tokens: PolicyTokens, generated: Tensor, most: float) -> Tensor:
    """bool [M]: DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556), which marks tokens with negative advantage
    in sequences whose mean log-ratio of the generator to the current policy is above `most`, nats a token.

    Args:
        generated: float32 [M], the generator's log-probs without truncation, whose renormalisation is no distance.
    """
    distances = F.at_level(generated - tokens.logprobs.detach(), tokens.sequences, tokens.turns, "geometric")
    return (tokens.advantages < 0) & (distances > most)


def behaviour_logprobs(batch: Batch) -> Tensor:
    """float32 [T]: the generator's log-probs of the distribution from which the tokens were drawn."""
    logprobs: Tensor = batch.gen_logprobs if batch.gen_logprobs_behaviour is None else batch.gen_logprobs_behaviour
    return logprobs


def mean_weight(config: PolicyLoss, batch: Batch, all_sum: AllSum) -> float:
    """The mean weight of `correction` over all ranks' model tokens, or over their sequences if the ratio is per
    sequence, weighted by their rows (verl's rollout_is_batch_normalize); 1 if it is below 1e-8. Collective over the
    ranks of all_sum."""
    index = policy_tokens(batch)
    old = required(batch, "old_logprobs", "correction_normalize")[index]
    sequences = batch.segment_ids[index]
    found = corrected(
        config.model_copy(update={"rejection_level": None}), old, behaviour_logprobs(batch)[index], sequences,
        batch.turn_ids[index],
    )  # fmt: skip
    counts = batch.weights[batch.row_ids[index]].double()
    if config.correction_level in ("geometric", "sequence"):
        counts = counts * is_last(sequences)
    total, count = all_sum(torch.stack([(counts * found.weights).sum(), counts.sum()])).tolist()
    mean = total / count if count else 1.0
    return mean if mean > MIN_MEAN else 1.0


def corrected(config: PolicyLoss, old: Tensor, behaviour: Tensor, sequences: Tensor, turns: Tensor) -> Correction:
    """The correction of the model tokens [M] with these log-probs, in these sequences and turns (int64 [M])."""
    assert config.correction != "none", "the caller checks that a correction is configured"
    weights, clipped = F.behaviour_weights(
        old, behaviour, sequences, turns, config.correction_level, config.correction, config.correction_low,
        config.correction_high,
    )  # fmt: skip
    level = config.rejection_level
    if level is None or config.correction == "reject":
        return Correction(weights, clipped)
    _, rejected = F.behaviour_weights(
        old, behaviour, sequences, turns, level, "reject", config.rejection_low, config.rejection_high
    )
    return Correction(torch.where(rejected > 0, 0.0, weights), clipped, rejected)
