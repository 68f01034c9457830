"""The section `imitation`: rows of answers that are trained on beside the rollouts."""

from __future__ import annotations

from hpcrl.config.data import Sources
from hpcrl.spec.fields import Positive, PositiveFloat, Section


class ImitationConfig(Section):
    """Rows whose answers are trained on in every step, beside the rollouts: of an expert, or of another model."""

    data: Sources | None = None
    """Rows with answers, in the forms of data.train, such as expert:NAME, the episodes of an environment's expert; its
    other keys are those of data. null: none."""
    num_rows: Positive = 16
    """Rows per step."""
    ce: PositiveFloat = 1.0
    """Weight of the cross-entropy of the answers' tokens."""
