"""The keys shared by all RL algorithms; the section of each algorithm adds its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hpcrl.spec.fields import NUMBER, Float, NonNegative, Positive, PositiveFloat, Section


def _kl_in_loss(value: Any) -> Any:
    if value == "k1":
        raise ValueError("abs, k2 or k3 (in the loss, the expected gradient of k1 is zero, so it would have no effect)")
    return value


class PolicyLoss(Section):
    """Keys that every clipped policy-gradient algorithm reads."""

    pg_clip_low: NonNegative = 0.2
    """Lower clip bound of the ratio is 1 minus this value."""
    pg_clip_high: NonNegative = 0.2
    """Upper clip bound of the ratio is 1 plus this value."""
    dual_clip: Annotated[float, Field(gt=1), NUMBER] | None = None
    """Constant c of dual clip (arXiv 1912.09729); null: off."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """Aggregation of token losses into one loss."""
    kl_loss_coef: NonNegative = 0.0
    """Weight of KL(policy, reference) in the loss."""
    kl_reward_coef: NonNegative = 0.0
    """Weight of the per-token KL(old policy, reference) subtracted from the reward."""
    kl_reward_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimator of the KL in the reward (docs/algorithms.md); the expected gradient of k1 is that of the exact KL."""
    kl_loss_estimator: Annotated[Literal["abs", "k2", "k3"], BeforeValidator(_kl_in_loss)] = "k2"
    """Estimator of the KL in the loss (docs/algorithms.md); the expected gradient of k2 is that of the exact KL."""
    entropy_loss_coef: Float = 0.0
    """Weight of the entropy bonus in the loss."""
    reward_clip: PositiveFloat | None = None
    """Rewards are clamped to +- this value; null: off."""
    advantage_clip: PositiveFloat | None = None
    """Advantages are clamped to +- this value; null: off."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Off-policy correction: token losses are multiplied by the ratio of the trainer's probabilities before the step to
    the generator's, clipped at correction_high (truncate, TIS) or dropped outside correction_low..correction_high
    (mask, MIS)."""
    correction_level: Literal["token", "geometric", "sequence"] = "token"
    """Level of the ratio: per token, or the geometric mean or the product over a response."""
    correction_low: NonNegative = 0.5
    """Lower bound of the ratio, below 1; used by mask only."""
    correction_high: PositiveFloat = 2.0
    """Upper bound of the ratio; above 1, or at least 1 with truncate."""
    whiten_advantages: bool = False
    """Subtract the mean of the batch's token advantages and divide by their standard deviation."""
    ppo_epochs: Positive = 1
    """Passes over the batch of a step."""
    num_mini_batches: Positive = 1
    """Optimizer steps per pass."""

    @property
    def outputs(self) -> frozenset[str]:
        """The optional outputs of the engine that the loss needs or only logs."""
        return frozenset({"entropy"})

    @property
    def uses_reference(self) -> bool:
        """Whether a KL term needs the reference policy's log-probs."""
        return self.kl_loss_coef > 0 or self.kl_reward_coef > 0
