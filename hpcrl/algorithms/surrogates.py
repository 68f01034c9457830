"""The surrogates of the policy gradient: a loss per token whose gradient is the expected reward's.

lp, old: log-probs of a token under the policy, and under the policy before the step or, with `ratio_to=generator`, the
policy that drew it; A: its advantage; sg: no gradient.

rho = exp(lp - old) at `ratio_level` token; else the geometric mean of these ratios over the turn or the response, or
their product over the response. Each token then has its own log-prob's gradient, as in GSPO-token (arXiv 2507.18071).
Longer surrogates are in separate files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpcrl.algorithms import functional as F
from hpcrl.algorithms.covariance import clip_cov, kl_cov
from hpcrl.algorithms.dppo import dppo
from hpcrl.algorithms.gmpo import gmpo
from hpcrl.algorithms.policy_tokens import PolicyTokens
from hpcrl.spec.policy_loss import PolicyLoss

Surrogate = Callable[[PolicyLoss, PolicyTokens], tuple[Tensor, Tensor]]
"""(loss, clipped), [M] each: `clipped` is 1 where a bound changed or removed the gradient, else 0."""


def ppo(config: PolicyLoss, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A), with dual clip (arXiv 1707.06347, 1912.09729)."""
    ratio = tokens.ratio(config.ratio_level)
    return F.clipped_policy_loss(ratio, tokens.advantages, config.pg_clip_low, config.pg_clip_high, config.dual_clip)


def cispo(config: PolicyLoss, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """-sg[clip(rho, 1 - low, 1 + high)] A lp (arXiv 2506.13585): every token keeps a gradient."""
    ratio = tokens.ratio(config.ratio_level).detach()
    weights = ratio.clamp(1.0 - config.pg_clip_low, 1.0 + config.pg_clip_high)
    return -weights * tokens.advantages * tokens.logprobs, (weights != ratio).to(ratio.dtype)


def topr(config: PolicyLoss, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """-A lp where A >= 0, else -sg[min(rho, 1)] A lp (TOPR, arXiv 2503.14286)."""
    ratio = tokens.ratio(config.ratio_level).detach()
    weights = torch.where(tokens.advantages >= 0, 1.0, ratio.clamp(max=1.0))
    cut = (tokens.advantages < 0) & (ratio > 1.0)
    return -weights * tokens.advantages * tokens.logprobs, cut.to(ratio.dtype)


def sapo(config: PolicyLoss, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """-4/tau sigmoid(tau (rho - 1)) A, with one tau for A > 0 and another for A <= 0 (SAPO, arXiv 2511.20347)."""
    ratio = tokens.ratio(config.ratio_level)
    tau = torch.where(tokens.advantages > 0, config.sapo_tau_positive, config.sapo_tau_negative)
    return -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * tokens.advantages, torch.zeros_like(ratio)


def kimi(config: PolicyLoss, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """-A lp + tau/2 d^2 with d = lp - old, of the token, the turn or the response (Kimi k1.5, arXiv 2501.12599)."""
    log_ratio = tokens.logprobs - tokens.old_logprobs
    penalty = log_ratio * F.at_level(log_ratio, tokens.sequences, tokens.turns, config.ratio_level)
    return -tokens.advantages * tokens.logprobs + 0.5 * config.kimi_tau * penalty, torch.zeros_like(log_ratio)


def vanilla(config: PolicyLoss, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """-A lp (REINFORCE, Williams 1992)."""
    return -tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.logprobs)


SURROGATES: dict[str, Surrogate] = {
    "ppo": ppo,
    "cispo": cispo,
    "topr": topr,
    "sapo": sapo,
    "kimi": kimi,
    "gmpo": gmpo,
    "dppo": dppo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "vanilla": vanilla,
}
