"""The section `reward_model`."""

from __future__ import annotations

from typing import Literal

from hpcrl.spec.fields import Positive, Section


class RewardModelConfig(Section):
    """The model of the role reward_model, for the reward reward_model. It is not trained."""

    path: str | None = None
    """Folder in HF layout of a model for sequence classification, or of an exported critic, with one label and a
    tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights, by default bfloat16 if the configuration asks for GPUs; the head is computed in float32."""
    max_tokens: Positive = 4096
    """Maximum length of a dialogue, tokens; the response of a longer one gets an error."""
    max_tokens_per_batch: Positive = 16384
    """Maximum tokens of one forward pass, with padding."""
    max_requests: Positive = 1024
    """Requests that a rank accepts at once; further ones are refused, and repeated by the reward."""
