"""The keys of the algorithms, and each algorithm's advantage estimator and objective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from hpcrl.spec.fields import Float, NonNegative, Share
from hpcrl.spec.kinds import AlgorithmSpec
from hpcrl.spec.policy_loss import PolicyLoss
from hpcrl.spec.problems import Problem

POLICY_GRADIENT = "hpcrl.algorithms.policy_gradient:PolicyGradient"


class GRPO(PolicyLoss):
    """Group-relative policy optimisation (arXiv 2402.03300)."""

    advantage_estimator: Literal["grpo"] = "grpo"
    """The advantage estimator."""
    std_normalize: bool = True
    """Divide by the group's standard deviation; false: Dr. GRPO's advantage (arXiv 2503.20783)."""
    std_eps: NonNegative = 1e-6
    """Added to the standard deviation."""


class GDPO(PolicyLoss):
    """GDPO (arXiv 2601.05242): normalises the parts of a composed reward separately within the group, and their
    weighted sum over the batch."""

    advantage_estimator: Literal["gdpo"] = "gdpo"
    """The advantage estimator."""
    std_eps: NonNegative = 1e-6
    """Added to standard deviations."""


class ReinforcePlusPlus(PolicyLoss):
    """REINFORCE++ (arXiv 2501.03262): returns of rewards minus the KL, whitened over the batch, PPO clip."""

    advantage_estimator: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """The advantage estimator."""
    whiten_advantages: bool = True
    """Subtract the mean of the batch's token advantages and divide by their standard deviation."""
    gamma: Share = 1.0
    """Discount per model token; tokens of observations between two turns are skipped without a discount."""


class Reinforce(PolicyLoss):
    """REINFORCE returns with PPO clip; rewards optionally normalised."""

    advantage_estimator: Literal["reinforce"] = "reinforce"
    """The advantage estimator."""
    gamma: Share = 1.0
    """Discount per model token; tokens of observations between two turns are skipped without a discount."""
    norm_mean_type: Literal["all", "batch", "group", "running"] | None = None
    """Mean reward to subtract: over the batch, the group, or all steps so far (running), each within the reward's
    domain; or over all domains of the batch (all); null: off."""
    norm_std_type: Literal["all", "batch", "group", "running"] | None = None
    """Divide rewards by their standard deviation, with the same choices; null: off."""
    std_eps: NonNegative = 1e-6
    """Added to the standard deviation."""


class RLOO(PolicyLoss):
    """RLOO (arXiv 2402.14740): a reward minus the mean of the group's other rewards."""

    advantage_estimator: Literal["rloo"] = "rloo"
    """The advantage estimator."""


class ReMax(PolicyLoss):
    """ReMax (arXiv 2310.10505): a reward minus the reward of the prompt's greedy response, which is not trained on."""

    advantage_estimator: Literal["remax"] = "remax"
    """The advantage estimator."""


class RaftPlusPlus(PolicyLoss):
    """RAFT++ (arXiv 2504.11343): train only on responses with positive rewards, with PPO clip."""

    advantage_estimator: Literal["raft_plus_plus"] = "raft_plus_plus"
    """The advantage estimator."""
    positive_above: Float = 0.0
    """Rewards above this value are positive."""


class Distill(PolicyLoss):
    """On-policy distillation: a token's advantage is the teacher's log-prob minus the policy's."""

    advantage_estimator: Literal["distill"] = "distill"
    """The advantage estimator."""


class TurnLoss(PolicyLoss):
    """Keys of advantage estimators for an episode's turns."""

    gamma: Share = 1.0
    """Discount per turn."""
    std_eps: NonNegative = 1e-6
    """Added to standard deviations."""


class TurnReinforce(TurnLoss):
    """REINFORCE by turn: all tokens of a turn have the turn's return, with PPO clip."""

    advantage_estimator: Literal["turn_reinforce"] = "turn_reinforce"
    """The advantage estimator."""
    norm_mean_type: Literal["all", "batch", "group"] | None = "batch"
    """Mean return to subtract: over the turns of the batch (within the domain), of all domains of the batch (all), or
    of the group; null: off."""
    norm_std_type: Literal["all", "batch", "group"] | None = "batch"
    """Divide returns by their standard deviation, with the same choices; null: off."""


class GiGPO(TurnLoss):
    """GiGPO (arXiv 2505.10978): episodes compared within their group, turns within the same state."""

    advantage_estimator: Literal["gigpo"] = "gigpo"
    """The advantage estimator."""
    gamma: Share = 0.95
    """Discount per turn."""
    step_weight: NonNegative = 1.0
    """Weight of the turns' advantages relative to the episodes' advantages."""
    std_normalize: bool = True
    """Divide by the standard deviations of group and state."""


class CriticLoss(PolicyLoss):
    """Keys of advantage estimators that use a critic's values."""

    gamma: Share = 1.0
    """Discount per model token; tokens of observations between two turns are skipped without a discount."""
    lambd: Share = 0.95
    """Lambda per model token. 1: advantages are returns minus values; 0: one-step temporal differences."""
    whiten_advantages: bool = True
    """Subtract the mean of the batch's token advantages and divide by their standard deviation."""


class GAE(CriticLoss):
    """PPO (arXiv 1707.06347): generalised advantage estimation (arXiv 1506.02438) from a critic's values."""

    advantage_estimator: Literal["gae"] = "gae"
    """The advantage estimator."""


class TurnGAE(CriticLoss):
    """Bi-level GAE (arXiv 2510.16907): over the turns of an episode, then over the tokens within each turn."""

    advantage_estimator: Literal["turn_gae"] = "turn_gae"
    """The advantage estimator."""
    turn_gamma: Share = 0.95
    """Discount per turn."""
    turn_lambd: Share = 0.95
    """Lambda, per turn."""


GRPO_SPEC = AlgorithmSpec(
    about="Group-relative policy optimisation: each response is compared with its group.",
    section=GRPO,
    make="hpcrl.algorithms.grpo:GRPOAdvantage",
    objective=POLICY_GRADIENT,
    compares_group=lambda section: True,
)

GDPO_SPEC = AlgorithmSpec(
    about="GDPO: as grpo, with the parts of a composed reward normalised separately.",
    section=GDPO,
    make="hpcrl.algorithms.gdpo:GDPOAdvantage",
    objective=POLICY_GRADIENT,
    compares_group=lambda section: True,
    decoupling_eps=lambda section: section.std_eps,
)

REINFORCE_PLUS_PLUS_SPEC = AlgorithmSpec(
    about="REINFORCE++: returns of rewards minus the KL, whitened over the batch.",
    section=ReinforcePlusPlus,
    make="hpcrl.algorithms.reinforce_plus_plus:ReinforcePlusPlusAdvantage",
    objective=POLICY_GRADIENT,
)

REINFORCE_SPEC = AlgorithmSpec(
    about="REINFORCE returns, rewards optionally normalised.",
    section=Reinforce,
    make="hpcrl.algorithms.reinforce:ReinforceAdvantage",
    objective=POLICY_GRADIENT,
    compares_group=lambda section: "group" in (section.norm_mean_type, section.norm_std_type),
)

RLOO_SPEC = AlgorithmSpec(
    about="RLOO: each response is compared with the mean of the group's other responses.",
    section=RLOO,
    make="hpcrl.algorithms.rloo:RLOOAdvantage",
    objective=POLICY_GRADIENT,
    compares_group=lambda section: True,
)

REMAX_SPEC = AlgorithmSpec(
    about="ReMax: each response is compared with its prompt's greedy response.",
    section=ReMax,
    make="hpcrl.algorithms.remax:ReMaxAdvantage",
    objective=POLICY_GRADIENT,
    greedy_baseline=True,
)

RAFT_PLUS_PLUS_SPEC = AlgorithmSpec(
    about="RAFT++: trains only on responses with a positive reward.",
    section=RaftPlusPlus,
    make="hpcrl.algorithms.raft_plus_plus:RaftPlusPlusAdvantage",
    objective=POLICY_GRADIENT,
)

DISTILL_SPEC = AlgorithmSpec(
    about="On-policy distillation: each token is judged by a teacher.",
    section=Distill,
    make="hpcrl.algorithms.distill:DistillAdvantage",
    objective=POLICY_GRADIENT,
    uses_teacher=lambda section: True,
)

GAE_SPEC = AlgorithmSpec(
    about="PPO: advantages from the values of a critic (GAE).",
    section=GAE,
    make="hpcrl.algorithms.gae:GAEAdvantage",
    objective=POLICY_GRADIENT,
    uses_critic=lambda section: True,
)

TURN_GAE_SPEC = AlgorithmSpec(
    about="PPO: advantages of turns, and of the tokens within a turn, from the values of a critic (bi-level GAE).",
    section=TurnGAE,
    make="hpcrl.algorithms.turn_gae:TurnGAEAdvantage",
    objective=POLICY_GRADIENT,
    uses_critic=lambda section: True,
)


def _check_turns(config: Any) -> Iterator[Problem]:
    """Report keys for token rewards, which advantage estimators for turns do not read."""
    for key in ("kl_reward_coef", "whiten_rewards"):
        if value := getattr(config.algorithm, key):
            estimator = config.algorithm.advantage_estimator
            text = f"algorithm.{key}: {value} acts on token rewards, and {estimator} has turn rewards"
            remedy = "kl_loss_coef" if key == "kl_reward_coef" else "whiten_advantages"
            yield Problem(("algorithm", key), f"{text}; use algorithm.{remedy}", (("algorithm",),))


TURN_REINFORCE_SPEC = AlgorithmSpec(
    about="REINFORCE by turn of an episode.",
    section=TurnReinforce,
    make="hpcrl.algorithms.turn_reinforce:TurnReinforceAdvantage",
    objective=POLICY_GRADIENT,
    compares_group=lambda section: "group" in (section.norm_mean_type, section.norm_std_type),
    check=_check_turns,
)

GIGPO_SPEC = AlgorithmSpec(
    about="GiGPO: episodes are compared with their group, turns with turns that began in the same state.",
    section=GiGPO,
    make="hpcrl.algorithms.gigpo:GiGPOAdvantage",
    objective=POLICY_GRADIENT,
    compares_group=lambda section: True,
    check=_check_turns,
)
