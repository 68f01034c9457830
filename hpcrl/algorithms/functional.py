"""Pure tensor maths of policy-gradient algorithms.

[M] are the model tokens (loss_mask) of a packed batch in order, `rows` [M] their rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hpcrl.algorithms.interface import AllSum
from hpcrl.rollout.batch import Norms

Over = Literal["all", "batch", "group", "running"] | None
Estimator = Literal["k1", "abs", "k2", "k3"]
RatioLevel = Literal["token", "turn", "geometric", "sequence"]
CorrectionKind = Literal["truncate", "mask", "reject"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

LOG_RATIO_LIMIT = 20.0  # e^20 is far beyond every clip and still finite in float32
DEGENERATE_STD = 1e-6


def normalize_rewards(
    rewards: Tensor,
    group_ids: Tensor,
    mean: Over,
    std: Over,
    eps: float,
    domain_ids: Tensor | None = None,
    running: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """float32 [N]: (r - mean) / (std + eps), without the division if the standard deviation is at most 1e-6 (one
    member, or equal rewards).

    Args:
        rewards: [N].
        group_ids: int64 [N].
        mean: Rewards whose mean is subtracted: all, of the domain (batch), of the group, or of all of the domain's
            steps so far (running); None: subtract no mean.
        std: The same choices for the sample standard deviation; None: no division.
        domain_ids: int64 [N]; None: one domain.
        running: Mean and standard deviation [N] of each reward's domain, for the choice running.
    """
    values = rewards.double()
    normalized = values
    _, groups = torch.unique(group_ids, return_inverse=True)
    one = torch.zeros_like(groups)
    over = {"all": one, "group": groups, "batch": one if domain_ids is None else domain_ids}

    def moments(choice: str) -> tuple[Tensor, Tensor]:
        if choice == "running":
            assert running is not None, "the advantage estimator keeps running statistics"
            return running
        return _moments(values, over[choice])

    if mean is not None:
        normalized = values - moments(mean)[0]
    if std is not None:
        spread = moments(std)[1]
        normalized = normalized / torch.where(spread > DEGENERATE_STD, spread + eps, 1.0)
    return normalized.float()


def _moments(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation (0 for one member) of each entry's group, [N] each."""
    size = int(groups.max()) + 1 if groups.numel() else 0
    zeros = values.new_zeros(size)
    counts = zeros.index_add(0, groups, torch.ones_like(values))
    means = (zeros.index_add(0, groups, values) / counts)[groups]
    squares = zeros.index_add(0, groups, (values - means).square())
    return means, (squares / (counts - 1).clamp(min=1)).sqrt()[groups]


def discounted_returns(token_rewards: Tensor, rows: Tensor, gamma: float) -> Tensor:
    """float32 [M]: G_t = r_t + gamma G_{t+1} within each row, by doubling: log2(longest row) vector operations.

    After the pass with distance d, G_t sums the first 2d rewards from t on. token_rewards [M], rows int64 [M], sorted.
    """
    returns = token_rewards.double()
    longest = int(torch.bincount(rows).max()) if rows.numel() else 0
    distance, discount = 1, gamma
    while distance < longest:
        same = rows[distance:] == rows[:-distance]
        ahead = torch.where(same, returns[distance:], 0.0)
        returns = torch.cat([returns[:-distance] + discount * ahead, returns[-distance:]])
        distance, discount = 2 * distance, discount * discount
    return returns.float()


def whiten(values: Tensor, all_sum: AllSum) -> Tensor:
    """float32 [M]: values minus their mean over sqrt(unbiased variance + 1e-8), over the tokens of all ranks.

    Collective over the ranks of all_sum, which may hold no tokens.
    """
    x = values.double()
    count, total = all_sum(torch.stack([x.new_tensor(float(x.numel())), x.sum()])).unbind()
    mean = total / count.clamp(min=1)
    squares = all_sum((x - mean).square().sum().reshape(1)).squeeze(0)
    return ((x - mean) / (squares / (count - 1).clamp(min=1) + 1e-8).sqrt()).float()


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """float32 [M]: estimate of KL(policy || reference) per token (joschu.net/blog/kl-approx.html).

    k1: log-ratio x; abs: its absolute value; k2: half its square; k3: e^-x + x - 1, unbiased and never negative. No
    value is clamped: a clamped penalty has no gradient, so it would hold the policy least where it drifted most. Below
    x = -20, where the exponential would overflow, its tangent is used.
    """
    log_ratio = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return log_ratio
        case "abs":
            return log_ratio.abs()
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            near = (-log_ratio).clamp(max=LOG_RATIO_LIMIT)
            return near.expm1() + near.exp() * (-log_ratio - near) + log_ratio


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """float32 [M]: pi / pi_old."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def at_level(log_ratio: Tensor, rows: Tensor, turns: Tensor, level: RatioLevel) -> Tensor:
    """float32 [M]: the log-ratio of each token (level token), its sum (sequence) or mean (geometric) over the tokens of
    the row, or its mean over the tokens of the turn. rows, turns: int64 [M], of each token, in order."""
    if level == "token":
        return log_ratio
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[1:] = rows[1:] != rows[:-1]
    if level == "turn":
        starts[1:] |= turns[1:] != turns[:-1]
    parts = starts.long().cumsum(0) - 1
    sums = row_sums(log_ratio, parts, len(rows))
    if level != "sequence":
        sums = sums / row_sums(torch.ones_like(parts), parts, len(rows)).clamp(min=1)
    return sums[parts]


def behaviour_weights(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    rows: Tensor,
    turns: Tensor,
    level: RatioLevel,
    correction: CorrectionKind,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """(weights, clipped), [M] each: importance weights for tokens that another policy than the proximal one drew.

    The ratio is proximal (the trainer before the step) over behaviour (the generator, possibly with older weights), at
    this level (at_level). truncate: limited to `high` (TIS, as in arXiv 1802.01561); mask: 0 outside [low, high] (MIS);
    reject: 0 for all tokens of a row with a ratio outside [low, high], 1 for all others. `clipped` is 1 where truncate
    or mask changed the ratio, and where reject drops a token. The weights have no gradient, as in decoupled PPO
    (arXiv 2110.00641).
    """
    log_ratio = at_level((old_logprobs - behaviour_logprobs).detach(), rows, turns, level)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    outside = (ratio > high) | (ratio < low)
    if correction == "truncate":
        return ratio.clamp(max=high), (ratio > high).to(ratio.dtype)
    if correction == "mask":
        return torch.where(outside, 0.0, ratio), outside.to(ratio.dtype)
    num_rows = int(rows[-1]) + 1 if len(rows) else 0
    rejected = (row_sums(outside.to(ratio.dtype), rows, num_rows) > 0)[rows].to(ratio.dtype)
    return 1.0 - rejected, rejected


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """(loss, clipped), [M] each: PPO's -min(rho A, clip(rho, 1 - low, 1 + high) A) (arXiv 1707.06347).

    Dual clip (arXiv 1912.09729) bounds the loss of negative advantages by -c A. `clipped` is 1 where a clip removed the
    gradient, else 0.
    """
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is not None:
        ceiling = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        clipped = clipped | (loss > ceiling)
        loss = torch.minimum(loss, ceiling)
    return loss, clipped.to(loss.dtype)


def token_weights(rows: Tensor, weights: Tensor, mode: Aggregation, norm_tokens: int | None = None) -> Tensor:
    """float32 [M]: each token's coefficient in the aggregation's sum: the weight of its row (weights: [B]), divided by
    the row's number of model tokens for seq-mean-token-mean, or by norm_tokens for seq-mean-token-sum-norm."""
    coefficients = weights[rows]
    if mode == "seq-mean-token-sum-norm":
        assert norm_tokens is not None, "the configuration requires loss_norm_tokens"
        coefficients = coefficients / norm_tokens
    if mode == "seq-mean-token-mean":
        coefficients = coefficients / row_sums(torch.ones_like(rows), rows, weights.numel())[rows]
    return coefficients


def denominator(norms: Norms, mode: Aggregation) -> float:
    """Denominator of aggregated sums; 1 for a mini-batch without weighted tokens."""
    return (norms.tokens if mode == "token-mean" else norms.sequences) or 1.0


def row_sums(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[B]: sum of each row's tokens."""
    return values.new_zeros(num_rows).index_add(0, rows, values)
