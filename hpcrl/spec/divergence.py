"""Which divergence of the student from its teacher a training engine computes per token. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DivergenceForm = Literal["sampled", "top_k", "full"]
"""Words over which teacher and student are compared: the sampled one, the teacher's most probable ones, or all."""


@dataclass(frozen=True)
class Divergence:
    """The generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649), as TRL's GKDTrainer.generalized_jsd_loss
    has it. ValueError for numbers outside their range.

    Args:
        form: `sampled`: estimated from the sampled token's log-probs, without an engine's help. `top_k`: over the
            teacher's k most probable words and one further class for all others; at most the divergence over the whole
            vocabulary, and equal to it if the others' relative probabilities are the teacher's. `full`: over the whole
            vocabulary.
        beta: 0: KL(teacher || student). 1: KL(student || teacher). Between: beta KL(teacher || m) + (1 - beta)
            KL(student || m), of the mixture m = beta teacher + (1 - beta) student. It approaches 0 at both ends.
        top_k: k of the form top_k.
        temperature: Logits of both models are divided by it.
    """

    form: DivergenceForm
    beta: float
    top_k: int
    temperature: float

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"divergence: beta={self.beta} is not between 0 (forward KL) and 1 (reverse KL)")
        if self.form == "top_k" and self.top_k < 1:
            raise ValueError(f"divergence: top_k={self.top_k} words of the teacher; take at least 1")
        if not self.temperature > 0:
            raise ValueError(f"divergence: temperature={self.temperature} is not above 0")
