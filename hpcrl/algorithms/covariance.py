"""Clip-Cov and KL-Cov (arXiv 2505.22617): limit the few tokens that reduce the entropy most.

cov_t = (A_t - mean of A) (old_t - mean of old)          means over the model tokens of the step

clip_cov   PPO's clip, and no gradient for cov_share of the tokens, drawn from those with cov_low < cov < cov_high
kl_cov     -rho A, plus cov_kl_coef |lp - old| for the cov_share of the tokens with the largest cov

The tokens are marked once per step, over all ranks, with the policy before the step, so the marks depend neither on
micro-batches nor on ranks. verl marks them in each micro-batch, with the current policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms import functional as F
from hpcrl.algorithms.interface import AllSum, required
from hpcrl.algorithms.policy_tokens import PolicyTokens
from hpcrl.algorithms.selection import largest, token_numbers
from hpcrl.algorithms.token_losses import surrogate_tokens, weighted_advantages
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch
from hpcrl.spec.divergence import Divergence
from hpcrl.spec.policy_loss import PolicyLoss


def mark(config: PolicyLoss, batch: Batch, all_sum: AllSum, divergence: Divergence | None = None) -> Stats:
    """Fill batch.marked, bool [T], see the module's docstring. At least one token is marked, if possible. Tokens
    without a surrogate (hpcrl.algorithms.token_losses) do not count. Returns statistics to log. Collective over the
    ranks of all_sum."""
    index = surrogate_tokens(batch, divergence)
    old = required(batch, "old_logprobs", f"surrogate={config.surrogate}")[index]
    advantages, old = weighted_advantages(batch, index, old, divergence).double(), old.double()
    sums = torch.stack([advantages.sum(), old.sum(), old.new_tensor(float(len(index)))])
    total_advantage, total_old, count = all_sum(sums).tolist()
    covariances = (advantages - total_advantage / max(count, 1)) * (old - total_old / max(count, 1))
    coefficients = token_numbers(batch.row_ids[index], batch.sample_ids)
    at_most = max(int(config.cov_share * count), 1)
    marked = torch.zeros_like(index, dtype=torch.bool)
    if config.surrogate == "clip_cov":
        within = (covariances > config.cov_low) & (covariances < config.cov_high)
        marked[within] = largest(torch.zeros_like(covariances[within]), coefficients[within], at_most, all_sum)
    else:
        marked = largest(covariances, coefficients, at_most, all_sum)
    batch.marked = torch.zeros_like(batch.loss_mask).index_copy(0, index, marked)
    return {"actor/covariance/*": stat(covariances), "actor/marked_ratio": stat(marked)}


def clip_cov(config: PolicyLoss, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """(loss, clipped), [M] each: as for PPO, but marked tokens have no gradient."""
    ratio, marked = tokens.ratio("token"), tokens.marks()
    loss, clipped = F.clipped_policy_loss(ratio, tokens.advantages, config.pg_clip_low, config.pg_clip_high, None)
    return torch.where(marked, 0.0, loss), torch.where(marked, 1.0, clipped)


def kl_cov(config: PolicyLoss, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """(loss, clipped), [M] each: -rho A, plus the penalty on marked tokens."""
    difference = tokens.logprobs - tokens.old_logprobs
    penalty = torch.where(tokens.marks(), config.cov_kl_coef * difference.abs(), 0.0)
    return penalty - tokens.ratio("token") * tokens.advantages, torch.zeros_like(difference)
