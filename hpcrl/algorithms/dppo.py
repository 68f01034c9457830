"""The surrogate of DPPO, divergence proximal policy optimisation (arXiv 2602.04879).

L_t = -A sg[min(rho, dppo_ratio_max)] lp; 0 for a token that has left the trust region in the direction of A

The region bounds the divergence of two distributions over (this token, any other), p = exp(lp), q = exp(old), by
pg_clip_high where A > 0 and by pg_clip_low elsewhere:

tv   |p - q|
kl   q log(q / p) + (1 - q) log((1 - q) / (1 - p))

Rare tokens exceed PPO's ratio bounds soon, although the distribution changes little; probable tokens exceed them late.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.policy_tokens import PolicyTokens
from hpcrl.spec.policy_loss import PolicyLoss

LEAST = 1e-8
"""Added to probabilities of other tokens."""


def dppo(config: PolicyLoss, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """(loss, clipped), [M] each, see the module's docstring."""
    logprobs, old = tokens.logprobs.detach(), tokens.old_logprobs
    p, q, rises = logprobs.exp().clamp(max=1.0), old.exp().clamp(max=1.0), tokens.advantages > 0  # up to rounding
    if config.dppo_divergence == "tv":
        divergence = (p - q).abs()
    else:
        divergence = q * (old - logprobs) + (1 - q) * ((1 - q + LEAST) / (1 - p + LEAST)).log()
    bounds = torch.where(rises, config.pg_clip_high, config.pg_clip_low)
    outside = (divergence > bounds) & torch.where(rises, p > q, p < q)
    weights = tokens.ratio("token").detach().clamp(max=config.dppo_ratio_max)
    loss = -tokens.advantages * weights * tokens.logprobs
    return torch.where(outside, 0.0, loss), outside.to(loss.dtype)
