"""The keys shared by all RL algorithms; the section of each algorithm adds its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hpcrl.spec.fields import NUMBER, Float, NonNegative, Positive, PositiveFloat, Section


def _estimator(value: Any) -> Any:
    if value == "full":
        raise ValueError(
            "k1, k2, k3 or abs (full, the exact KL over the vocabulary, needs the logits of both policies at one "
            "place, and no engine has them; k1 in the reward and k2 in the loss have its expected gradient)"
        )
    return value


def _kl_in_loss(value: Any) -> Any:
    if value == "k1":
        raise ValueError("abs, k2 or k3 (in the loss, the expected gradient of k1 is zero, so it would have no effect)")
    return _estimator(value)


SURROGATE_KEYS: dict[str, frozenset[str]] = {
    "ppo": frozenset({"ratio_level", "pg_clip_low", "pg_clip_high", "dual_clip"}),
    "cispo": frozenset({"ratio_level", "pg_clip_low", "pg_clip_high"}),
    "topr": frozenset({"ratio_level"}),
    "sapo": frozenset({"ratio_level", "sapo_tau_positive", "sapo_tau_negative"}),
    "kimi": frozenset({"ratio_level", "kimi_tau"}),
    "vanilla": frozenset(),
}
"""The keys that each surrogate reads, among those that not all read."""


class PolicyLoss(Section):
    """Keys that every policy-gradient algorithm reads."""

    surrogate: Literal["ppo", "cispo", "topr", "sapo", "kimi", "vanilla"] = "ppo"
    """Loss of a token: PPO's clip, CISPO (arXiv 2506.13585), TOPR (arXiv 2503.14286), SAPO (arXiv 2511.20347), Kimi
    k1.5 (arXiv 2501.12599), or the plain policy gradient (docs/algorithms.md)."""
    ratio_level: Literal["token", "turn", "geometric", "sequence"] = "token"
    """Level of the ratio to the policy before the step: per token, the geometric mean over a turn of the model, or the
    geometric mean (with ppo: GSPO, arXiv 2507.18071) or the product over a response."""
    pg_clip_low: NonNegative = 0.2
    """Lower clip bound of the ratio is 1 minus this value."""
    pg_clip_high: NonNegative = 0.2
    """Upper clip bound of the ratio is 1 plus this value."""
    dual_clip: Annotated[float, Field(gt=1), NUMBER] | None = None
    """Constant c of dual clip (arXiv 1912.09729); null: off."""
    sapo_tau_positive: PositiveFloat = 1.0
    """Steepness of SAPO's gate for tokens of positive advantage."""
    sapo_tau_negative: PositiveFloat = 1.05
    """Steepness of SAPO's gate for the other tokens."""
    kimi_tau: PositiveFloat = 0.1
    """Weight of Kimi k1.5's squared log-ratio."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """Aggregation of token losses into one loss."""
    loss_norm_tokens: Positive | None = None
    """Constant by which seq-mean-token-sum-norm divides the sum of a response, such as rollout.max_new_tokens."""
    kl_loss_coef: NonNegative = 0.0
    """Weight of KL(policy, reference) in the loss."""
    kl_reward_coef: NonNegative = 0.0
    """Weight of the per-token KL(old policy, reference) subtracted from the reward."""
    kl_reward_estimator: Annotated[Literal["k1", "abs", "k2", "k3"], BeforeValidator(_estimator)] = "k1"
    """Estimator of the KL in the reward (docs/algorithms.md); the expected gradient of k1 is that of the exact KL."""
    kl_loss_estimator: Annotated[Literal["abs", "k2", "k3"], BeforeValidator(_kl_in_loss)] = "k2"
    """Estimator of the KL in the loss (docs/algorithms.md); the expected gradient of k2 is that of the exact KL."""
    kl_target: PositiveFloat | None = None
    """Target of the KL to the reference (critic/kl), nats a token: both KL coefficients are multiplied by one factor
    that follows it from step to step (arXiv 1909.08593); null: constant coefficients."""
    kl_horizon: PositiveFloat = 10000.0
    """Responses over which the coefficients change by at most a fifth."""
    entropy_loss_coef: Float = 0.0
    """Weight of the entropy bonus in the loss; with entropy_target, that of the first step."""
    entropy_target: NonNegative | None = None
    """Target of the entropy, nats a token: after a step below it the bonus grows, above it the bonus has weight 0
    (arXiv 2505.22312); null: a constant bonus."""
    entropy_coef_step: PositiveFloat = 0.005
    """Change of the weight of the entropy bonus after each step with entropy_target."""
    reward_clip: PositiveFloat | None = None
    """Rewards are clamped to +- this value; null: off."""
    advantage_clip: PositiveFloat | None = None
    """Advantages are clamped to +- this value; null: off."""
    correction: Literal["none", "truncate", "mask", "reject"] = "none"
    """Off-policy correction: token losses are multiplied by the ratio of the trainer's probabilities before the step to
    the generator's, clipped at correction_high (truncate, TIS) or dropped outside correction_low..correction_high
    (mask, MIS). reject: responses with any ratio outside these bounds are dropped, all others keep weight 1."""
    correction_level: Literal["token", "turn", "geometric", "sequence"] = "token"
    """Level of the ratio: per token, the geometric mean over a turn of the model, or the geometric mean or the product
    over a response."""
    correction_low: NonNegative = 0.5
    """Lower bound of the ratio, below 1; used by mask and reject only."""
    correction_high: PositiveFloat = 2.0
    """Upper bound of the ratio; above 1, or at least 1 with truncate."""
    whiten_rewards: bool = False
    """Subtract the mean of the batch's token rewards, with their KL, and divide by their standard deviation."""
    whiten_advantages: bool = False
    """Subtract the mean of the batch's token advantages and divide by their standard deviation."""
    max_len_mask: bool = False
    """Do not learn from responses that the limit of tokens ended."""
    difficulty_mask: bool = False
    """Learn only from prompts whose mean score lies between the two thresholds."""
    difficulty_low_threshold: Float = 0.1
    """Prompts whose mean score is above it are kept."""
    difficulty_high_threshold: Float = 0.95
    """Prompts whose mean score is below it are kept."""
    error_max_len_clip: Positive | None = None
    """Do not learn from responses of this many tokens or more whose score is below 1; null: off."""
    difficulty_loss_weight: bool = False
    """Weight responses by 0.5 + 1.5 d, rescaled to mean 1; d: 1 minus the mean score of the prompt's responses."""
    length_loss_weight: bool = False
    """Weight responses by 1.5 minus their length, scaled to 0..1 over the step; rescaled to mean 1."""
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
