"""The section of pipelines that train a model with one output per token (PipelineSpec.trains_head)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from hpcrl.spec.fields import NonNegative, Positive, Section

NAME = re.compile(r"[\w.-]{1,64}")
"""The name of a head, which is also a column of rows and a part of metrics' names."""


def _heads(value: Any) -> int | list[str]:
    if isinstance(value, list) and value:
        names = [str(name) for name in value]
        if wrong := [name for name in names if not NAME.fullmatch(name)]:
            raise ValueError(f"expected names of letters, digits, '.', '_' and '-', not {wrong[0][:64]!r}")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"expected each head once, not {twice[0]} twice")
        return names
    if not isinstance(value, bool) and re.fullmatch(r"[1-9]\d{0,3}", str(value)):
        return int(value)
    raise ValueError("expected a list of names or a number from 1 to 9999")


class HeadTrainingConfig(Section):
    """The reward model pipeline: a model with a scalar head learns to score dialogues."""

    rows: Literal["pairs", "scores", "steps"] = "pairs"
    """What a row gives: `pairs` a chosen and a rejected answer, and optionally a margin (Bradley-Terry); `scores` an
    answer and its score (squared error); `steps` the steps of an answer and a label for each (cross entropy)."""
    heads: Annotated[int | list[str], BeforeValidator(_heads)] = 1
    """With rows=scores, what a model scores: a list of names, each a column of the rows and a label of the export, or
    the number of scores in each row's list `score`; more than one head is trained by regression on all of them."""
    batch_size: Positive = 64
    """Rows per step."""
    center_coef: NonNegative = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores around 0 (TRL's center_rewards_coefficient;
    arXiv 2312.09244); 0: off."""
    max_tokens: Positive = 4096
    """Maximum length of a dialogue, tokens; longer rows are skipped, and counted in rows/skipped."""
    step_separator: str = "\n"
    """Text after each step of a row with steps; a step's value is read at its last token."""

    @property
    def labels(self) -> list[str]:
        """The heads' names; transformers' for heads without names."""
        return [f"LABEL_{n}" for n in range(self.heads)] if isinstance(self.heads, int) else list(self.heads)
