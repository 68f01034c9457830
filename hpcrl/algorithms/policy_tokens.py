"""The inputs of a policy-gradient surrogate (hpcrl.algorithms.surrogates)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hpcrl.algorithms import functional as F


@dataclass(frozen=True)
class PolicyTokens:
    """The model tokens [M] of a micro-batch, with their sequences and turns [M]. In an episode by steps, each step is a
    separate sequence."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequences: Tensor
    turns: Tensor
    marked: Tensor | None = None
    """bool [M]: batch.marked, if it is filled."""

    def marks(self) -> Tensor:
        """bool [M]: the tokens that the objective marked in the step (hpcrl.algorithms.covariance)."""
        if self.marked is None:
            raise ValueError("batch.marked must be filled for a surrogate that treats some tokens separately")
        return self.marked

    def ratio(self, level: F.RatioLevel) -> Tensor:
        """float32 [M]: rho at this level, see hpcrl.algorithms.surrogates."""
        if level == "token":
            return F.importance_ratio(self.logprobs, self.old_logprobs)
        whole = F.at_level((self.logprobs - self.old_logprobs).detach(), self.sequences, self.turns, level)
        return F.importance_ratio(whole + self.logprobs, self.logprobs.detach())
