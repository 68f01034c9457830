"""The section of pipelines that train a model with one output per token (PipelineSpec.trains_head)."""

from __future__ import annotations

from typing import Literal

from hpcrl.spec.fields import NonNegative, Positive, Section


class HeadTrainingConfig(Section):
    """The reward model pipeline: a model with a scalar head learns to score dialogues."""

    rows: Literal["pairs", "scores", "steps"] = "pairs"
    """What a row gives: `pairs` a chosen and a rejected answer, and optionally a margin (Bradley-Terry); `scores` an
    answer and its score (squared error); `steps` the steps of an answer and a label for each (cross entropy)."""
    batch_size: Positive = 64
    """Rows per step."""
    center_coef: NonNegative = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores around 0 (TRL's center_rewards_coefficient;
    arXiv 2312.09244); 0: off."""
    max_tokens: Positive = 4096
    """Maximum length of a dialogue, tokens; longer rows are skipped, and counted in rows/skipped."""
    step_separator: str = "\n"
    """Text after each step of a row with steps; a step's value is read at its last token."""
