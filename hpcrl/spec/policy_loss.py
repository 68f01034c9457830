"""The keys shared by all RL algorithms; the section of each algorithm adds its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hpcrl.spec.fields import NUMBER, Count, Float, NonNegative, Positive, PositiveFloat, Section


def _estimator(value: Any) -> Any:
    if value == "full":
        raise ValueError(
            "k1, k2, k3 or abs (full, the exact KL over the vocabulary, needs the logits of both policies at one "
            "place, and no engine has them; k1 in the reward and k2 in the loss have its expected gradient)"
        )
    return value


def _kl_in_loss(value: Any) -> Any:
    if value == "k1":
        raise ValueError(
            "abs, k2, k3 or k3_weighted (in the loss, the expected gradient of k1 is zero, so it would have no effect)"
        )
    return _estimator(value)


SURROGATE_KEYS: dict[str, frozenset[str]] = {
    "ppo": frozenset({"ratio_to", "ratio_level", "pg_clip_low", "pg_clip_high", "dual_clip"}),
    "cispo": frozenset({"ratio_to", "ratio_level", "pg_clip_low", "pg_clip_high"}),
    "topr": frozenset({"ratio_to", "ratio_level"}),
    "sapo": frozenset({"ratio_to", "ratio_level", "sapo_tau_positive", "sapo_tau_negative"}),
    "kimi": frozenset({"ratio_to", "ratio_level", "kimi_tau"}),
    "gmpo": frozenset({"ratio_to", "pg_clip_low", "pg_clip_high"}),
    "dppo": frozenset({"ratio_to", "pg_clip_low", "pg_clip_high", "dppo_divergence", "dppo_ratio_max"}),
    "clip_cov": frozenset({"ratio_to", "pg_clip_low", "pg_clip_high", "cov_share", "cov_low", "cov_high"}),
    "kl_cov": frozenset({"ratio_to", "cov_share", "cov_kl_coef"}),
    "vanilla": frozenset(),
}
"""The keys that each surrogate reads, without keys that all of them read."""

POLICY_GRADIENT = "hpcrl.algorithms.policy_gradient:PolicyGradient"
"""The objective of all of hpcrl's algorithms."""

MARKS_TOKENS = ("clip_cov", "kl_cov")
"""Surrogates that treat some tokens differently; these tokens are marked once per step."""

CORRECTION_KEYS: dict[str, tuple[str, ...]] = {
    "correction_level": ("truncate", "mask", "reject"),
    "correction_low": ("mask", "reject"),
    "correction_high": ("truncate", "mask", "reject"),
    "correction_normalize": ("truncate", "mask", "reject"),
    "rejection_level": ("truncate", "mask"),
    "rejection_low": ("truncate", "mask"),
    "rejection_high": ("truncate", "mask"),
}
"""Key -> the corrections that read it."""


class PolicyLoss(Section):
    """Keys that every policy-gradient algorithm reads."""

    surrogate: Literal["ppo", "cispo", "topr", "sapo", "kimi", "gmpo", "dppo", "clip_cov", "kl_cov", "vanilla"] = "ppo"
    """Loss of a token: PPO's clip, CISPO (arXiv 2506.13585), TOPR (arXiv 2503.14286), SAPO (arXiv 2511.20347), Kimi
    k1.5 (arXiv 2501.12599), GMPO (arXiv 2507.20673), DPPO (arXiv 2602.04879), Clip-Cov or KL-Cov (arXiv 2505.22617),
    or the plain policy gradient (docs/algorithms.md)."""
    ratio_to: Literal["trainer", "generator"] = "trainer"
    """Denominator of the ratio: the trainer's policy before the step, or the generator's probabilities of the tokens
    that it drew. generator replaces the correction and needs no pass for old log-probs, but the clip then also counts
    staleness."""
    ratio_level: Literal["token", "turn", "geometric", "sequence"] = "token"
    """Level of the ratio to that policy: per token, the geometric mean over a turn of the model, or the
    geometric mean (with ppo: GSPO, arXiv 2507.18071) or the product over a response."""
    pg_clip_low: NonNegative = 0.2
    """The ratio's lower clip bound is 1 minus this value. With gmpo, the log-ratio's lower bound is minus this value;
    with dppo, it is the maximum divergence where the advantage is not positive."""
    pg_clip_high: NonNegative = 0.2
    """The ratio's upper clip bound is 1 plus this value. With gmpo, the log-ratio's upper bound is this value; with
    dppo, it is the maximum divergence where the advantage is positive."""
    dual_clip: Annotated[float, Field(gt=1), NUMBER] | None = None
    """Constant c of dual clip (arXiv 1912.09729); null: off."""
    sapo_tau_positive: PositiveFloat = 1.0
    """Steepness of SAPO's gate for tokens of positive advantage."""
    sapo_tau_negative: PositiveFloat = 1.05
    """Steepness of SAPO's gate for all other tokens."""
    kimi_tau: PositiveFloat = 0.1
    """Weight of Kimi k1.5's squared log-ratio."""
    dppo_divergence: Literal["tv", "kl"] = "tv"
    """Divergence that DPPO bounds: total variation, or KL(old policy, policy), of this token against any other."""
    dppo_ratio_max: PositiveFloat = 20.0
    """Largest ratio by which DPPO weights a token."""
    cov_share: Annotated[float, Field(gt=0, le=1), NUMBER] = 2e-4
    """Share of the step's tokens (at least one token) that Clip-Cov or KL-Cov treat differently."""
    cov_low: Float = 1.0
    """Clip-Cov draws its tokens from tokens with a covariance above this value."""
    cov_high: Float = 5.0
    """Clip-Cov draws its tokens from tokens with a covariance below this value."""
    cov_kl_coef: PositiveFloat = 1.0
    """Weight of KL-Cov's penalty, the absolute log-ratio."""
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
    """Estimator of the KL in the reward (docs/algorithms.md). The expected gradient of k1 is the exact KL's; the other
    estimators can push the policy away from the reference."""
    kl_loss_estimator: Annotated[Literal["abs", "k2", "k3", "k3_weighted"], BeforeValidator(_kl_in_loss)] = "k2"
    """Estimator of the KL in the loss (docs/algorithms.md). The expected gradients of k2 and k3_weighted are the exact
    KL's, for k3_weighted (k3 times the ratio) also on tokens that another policy drew."""
    kl_target: PositiveFloat | None = None
    """Target of the KL to the reference (critic/kl), nats a token: both KL coefficients are multiplied by one factor
    that follows it from step to step (arXiv 1909.08593); null: constant coefficients."""
    kl_horizon: PositiveFloat = 10000.0
    """Responses over which the coefficients change by at most a fifth."""
    ref_update_steps: Count | None = None
    """Steps between updates of the KL terms' reference to the current policy (arXiv 2404.09656); null: the initial
    model stays the reference."""
    entropy_share: Annotated[float, Field(gt=0, le=1), NUMBER] = 1.0
    """Share of the step's tokens that get a policy loss: the tokens with the highest entropy before the step (arXiv
    2506.01939); below 1 it costs a pass for the entropies."""
    entropy_loss_coef: Float = 0.0
    """Weight of the entropy bonus in the loss; with entropy_target, its weight in the first step."""
    entropy_target: NonNegative | None = None
    """Target of the entropy, nats a token: after a step below it the bonus grows, above it the bonus has weight 0
    (arXiv 2505.22312); null: a constant bonus."""
    entropy_coef_step: PositiveFloat = 0.005
    """Change of the entropy bonus's weight after each step with entropy_target."""
    reward_clip: PositiveFloat | None = None
    """Rewards are clamped to +- this value before the KL is subtracted; null: off."""
    advantage_clip: PositiveFloat | None = None
    """Advantages are clamped to +- this value; null: off."""
    correction: Literal["none", "truncate", "mask", "reject"] = "none"
    """Off-policy correction, by default truncate with rollout.max_staleness above 0: token losses are multiplied by the
    ratio of the trainer's probabilities before the step to the generator's, clipped at correction_high (truncate, TIS)
    or dropped outside correction_low..correction_high (mask, MIS). reject: responses with any ratio outside these
    bounds are dropped, all others keep weight 1."""
    correction_level: Literal["token", "turn", "geometric", "sequence"] = "token"
    """Level of the ratio: per token, the geometric mean over a turn of the model, or the geometric mean or the product
    over a response."""
    correction_low: NonNegative = 0.5
    """Lower bound of the ratio, below 1; used by mask and reject only."""
    correction_high: PositiveFloat = 2.0
    """Upper bound of the ratio; above 1, or at least 1 with truncate."""
    correction_normalize: bool = False
    """Divide the weights of a correction by their mean over the step, before rejection_level drops any; costs the pass
    for old_logprobs."""
    rejection_level: Literal["token", "turn", "geometric", "sequence"] | None = None
    """With correction=truncate or mask, also drop responses as correction=reject does, by a ratio of this level with
    separate bounds; null: off."""
    rejection_low: NonNegative = 0.5
    """Lower bound of the ratio for rejection_level, below 1."""
    rejection_high: PositiveFloat = 2.0
    """Upper bound of the ratio for rejection_level, above 1."""
    off_policy_mask: PositiveFloat | None = None
    """Do not learn from responses with negative advantage whose mean log-ratio of the generator to the current policy
    is above this value, nats a token (arXiv 2512.02556); null: off."""
    whiten_rewards: bool = False
    """Subtract the mean of the batch's token rewards, with their KL, and divide by their standard deviation."""
    whiten_advantages: bool = False
    """Subtract the mean of the batch's token advantages and divide by their standard deviation."""
    max_len_mask: bool = False
    """Do not learn from responses that the token limit ended."""
    difficulty_mask: bool = False
    """Learn only from prompts whose mean score lies between the two thresholds."""
    difficulty_low_threshold: Float = 0.1
    """Prompts with a mean score above this value are kept."""
    difficulty_high_threshold: Float = 0.95
    """Prompts with a mean score below this value are kept."""
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
    def correction_levels(self) -> dict[str, str]:
        """The levels of the off-policy correction's ratios, by key; empty without a correction."""
        keys = [key for key in ("correction_level", "rejection_level") if self.correction in CORRECTION_KEYS[key]]
        return {key: level for key in keys if (level := getattr(self, key)) is not None}

    @property
    def compares_with_generator(self) -> bool:
        """Whether the surrogate's ratio is relative to the generator's log-probs."""
        return self.ratio_to == "generator" and "ratio_to" in SURROGATE_KEYS[self.surrogate]

    @property
    def behaviour_levels(self) -> dict[str, str]:
        """The levels of all ratios to the generator's log-probs, by key."""
        reads = self.compares_with_generator and "ratio_level" in SURROGATE_KEYS[self.surrogate]
        return self.correction_levels | ({"ratio_level": self.ratio_level} if reads else {})

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per step."""
        return self.ppo_epochs * self.num_mini_batches

    @property
    def uses_reference(self) -> bool:
        """Whether a KL term needs the reference policy's log-probs."""
        return self.kl_loss_coef > 0 or self.kl_reward_coef > 0
