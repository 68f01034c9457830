"""The keys that every algorithm of rewards has; each algorithm's section adds its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hpcrl.spec.fields import NUMBER, Float, NonNegative, Positive, PositiveFloat, Section


def _kl_in_loss(value: Any) -> Any:
    if value == "k1":
        raise ValueError("abs, k2 or k3 (in the loss, the expected gradient of k1 is zero: it would hold nothing back)")
    return value


class PolicyLoss(Section):
    """Keys that every clipped policy-gradient algorithm reads."""

    pg_clip_low: NonNegative = 0.2
    """Ratio is clipped below at 1 - this."""
    pg_clip_high: NonNegative = 0.2
    """Ratio is clipped above at 1 + this."""
    dual_clip: Annotated[float, Field(gt=1), NUMBER] | None = None
    """c of dual clip (arXiv 1912.09729); null: off."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How token losses become one number."""
    kl_loss_coef: NonNegative = 0.0
    """Weight of KL(policy, reference) in the loss."""
    kl_reward_coef: NonNegative = 0.0
    """Weight of the per-token KL(old policy, reference) taken from the reward."""
    kl_reward_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimator of the KL in the reward (docs/algorithms.md); k1, whose expected gradient is that of the exact KL."""
    kl_loss_estimator: Annotated[Literal["abs", "k2", "k3"], BeforeValidator(_kl_in_loss)] = "k2"
    """Estimator of the KL in the loss (docs/algorithms.md); k2, whose expected gradient is that of the exact KL."""
    entropy_loss_coef: Float = 0.0
    """Weight of the entropy bonus in the loss."""
    reward_clip: PositiveFloat | None = None
    """Rewards are clamped to +- this; null: off."""
    advantage_clip: PositiveFloat | None = None
    """Advantages are clamped to +- this; null: off."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """What is done about responses of older weights or another engine: token losses are multiplied by the ratio of the
    trainer's probabilities before the step to the generator's, cut at correction_high (TIS) or dropped outside
    correction_low..correction_high (MIS)."""
    correction_level: Literal["token", "geometric", "sequence"] = "token"
    """The ratio is each token's, or the geometric mean or the product over a response."""
    correction_low: NonNegative = 0.5
    """Lower bound of the ratio, below 1; read by mask alone."""
    correction_high: PositiveFloat = 2.0
    """Upper bound of the ratio; above 1, with truncate at least 1."""
    whiten_advantages: bool = False
    """Subtract the mean of the batch's token advantages and divide by their standard deviation."""
    ppo_epochs: Positive = 1
    """Passes over a step's batch."""
    num_mini_batches: Positive = 1
    """Optimizer steps of a pass."""

    @property
    def uses_reference(self) -> bool:
        """Whether a KL term needs the reference policy's log-probs."""
        return self.kl_loss_coef > 0 or self.kl_reward_coef > 0
