"""The divergence from a teacher that a run learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Divergence:
    """How a student's distribution over the next token is compared with its teacher's.

    Args:
        form: sampled: only at the token drawn; top_k: over the teacher's most probable tokens; full: over the
            vocabulary.
        beta: 0: forward KL(teacher, student), 1: reverse KL(student, teacher), between: the generalised Jensen-Shannon
            divergence (GKD, arXiv 2306.13649). Not read by the form sampled, which is the reverse KL.
        top_k: Tokens of the form top_k.
        temperature: Logits of both are divided by this.
    """

    form: Literal["sampled", "top_k", "full"]
    beta: float
    top_k: int
    temperature: float
