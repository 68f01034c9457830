"""The surrogate of GMPO, geometric-mean policy optimisation (arXiv 2507.20673).

d_t = lp - old, clipped where it moved far in the direction of the advantage: at pg_clip_high if A > 0, at
      -pg_clip_low if A < 0. Clipped tokens have no gradient
L_t = -exp(mean of d over the response) A, for each token of the response

One outlier token changes a geometric mean little, so the clip range can be wider than in PPO: the paper clips the
log-ratio at .4. The mean of L over a response is the paper's loss (loss_aggregation=seq-mean-token-mean).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms import functional as F
from hpcrl.algorithms.policy_tokens import PolicyTokens
from hpcrl.spec.policy_loss import PolicyLoss


def gmpo(config: PolicyLoss, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """(loss, clipped), [M] each, see the module's docstring. A token's loss has a gradient for all tokens of its
    response."""
    difference, advantages = tokens.logprobs - tokens.old_logprobs, tokens.advantages
    bounded = torch.where(
        advantages >= 0, difference.clamp(max=config.pg_clip_high), difference.clamp(min=-config.pg_clip_low)
    )
    mean = F.at_level(bounded, tokens.sequences, tokens.turns, "geometric")
    ratio = mean.clamp(-F.LOG_RATIO_LIMIT, F.LOG_RATIO_LIMIT).exp()
    return -ratio * advantages, (bounded != difference).to(ratio.dtype)
