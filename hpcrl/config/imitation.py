"""The section `imitation`: rows of answers beside the rollouts, and turns of an expert within them."""

from __future__ import annotations

from hpcrl.config.data import Sources
from hpcrl.spec.fields import Positive, PositiveFloat, Section, Share


class ImitationConfig(Section):
    """What is imitated in every step: rows of answers beside the rollouts, and an expert's turns within episodes."""

    data: Sources | None = None
    """Rows with answers, in the forms of data.train, such as expert:NAME, the episodes of an environment's expert; its
    other keys are those of data. null: none."""
    num_rows: Positive = 16
    """Rows per step."""
    ce: PositiveFloat = 1.0
    """Weight of the cross-entropy of the tokens of answers and of an expert's turns."""
    expert_turns: Share = 0.0
    """Probability that a turn of a training episode is played by the environment's expert instead of the policy. The
    tokens of such a turn have the cross-entropy, and no policy loss."""
    expert_decay_prompts: Positive | None = None
    """Number of training prompts over which this probability falls linearly to 0; null: it stays."""
