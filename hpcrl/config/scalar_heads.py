"""The sections `critic` and `reward_model`: models with a scalar head."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from hpcrl.spec.fields import NUMBER, Float, Natural, NonEmpty, NonNegative, Positive, PositiveFloat, Section
from hpcrl.spec.tables import TRAIN_ENGINES


def train_engine_name(name: str) -> str:
    """The name of a training engine that a configuration may select; else a pydantic error with these names."""
    if name not in list(TRAIN_ENGINES) or not TRAIN_ENGINES[name].selectable:
        selectable = [other for other, spec in TRAIN_ENGINES.items() if spec.selectable]
        raise PydanticCustomError("literal_error", "{expected}", {"expected": " or ".join(selectable)})
    return name


def _not_zero(weights: dict[str, float]) -> dict[str, float]:
    if weights and not any(weights.values()):
        raise ValueError("expected a weight that is not 0, since all scores would be equal")
    return weights


class CriticConfig(Section):
    """The critic, which an algorithm with values (gae, turn_gae) trains in addition to the policy. The section
    `trainer` has all other keys of its engine, and the engine's section."""

    path: NonEmpty | None = None
    """Folder in HF layout with its initial decoder, and with its head if it is an exported critic; null: the policy's
    folder (model)."""
    engine: Annotated[str, AfterValidator(train_engine_name)] | None = None
    """Training engine; null: trainer.engine."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate (AdamW)."""
    min_lr: NonNegative = 0.0
    """Final learning rate of a schedule."""
    lr_warmup_steps: Natural = 0
    """Optimizer steps of linear learning-rate warm-up."""
    lr_schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """Learning-rate schedule after the warm-up; wsd: constant, and linear to min_lr in the last lr_decay_steps
    (warm-up, stable, decay; arXiv 2404.06395)."""
    lr_decay_steps: Positive | None = None
    """Optimizer steps of the decay of lr_schedule=wsd; null: a tenth of all steps."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=True), NUMBER] = 1.0
    """Maximum gradient norm, to which gradients are clipped; inf: off."""
    value_clip: PositiveFloat | None = 0.5
    """Values are clipped to +- this value around the values before the step, and the larger loss counts; null: off."""
    warmup_steps: Natural = 0
    """Initial steps that train only the critic."""


class RewardModelConfig(Section):
    """The model of the role reward_model, for the reward reward_model. It is not trained."""

    path: NonEmpty | None = None
    """Folder in HF layout of a model for sequence classification, or of an exported critic, with a tokenizer."""
    head_weights: Annotated[dict[str, Float], AfterValidator(_not_zero)] = {}
    """Maps heads of a model with several, by their names in config.json (id2label), to their weights in the score;
    other heads have the weight 0."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights, by default bfloat16 if the configuration requests GPUs; the head is computed in float32."""
    max_tokens: Positive = 4096
    """Maximum length of a dialogue, tokens; the response of a longer dialogue gets an error."""
    max_tokens_per_batch: Positive = 16384
    """Maximum tokens of one forward pass, padding included."""
    max_requests: Positive = 1024
    """Requests that a rank accepts at once; further requests are refused, and the reward repeats them."""
