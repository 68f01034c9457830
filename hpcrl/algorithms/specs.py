"""The algorithms' keys, and the pair of a credit and an objective that each of them is."""

from __future__ import annotations

from typing import Literal

from hpcrl.spec.fields import NonNegative, Share
from hpcrl.spec.kinds import AlgorithmSpec
from hpcrl.spec.policy_loss import PolicyLoss

POLICY_GRADIENT = "hpcrl.algorithms.policy_gradient:PolicyGradient"


class GRPO(PolicyLoss):
    """Group-relative policy optimisation (arXiv 2402.03300)."""

    name: Literal["grpo"] = "grpo"
    """The algorithm."""
    std_normalize: bool = True
    """Divide by the group's standard deviation; false: Dr. GRPO's advantage (arXiv 2503.20783)."""
    std_eps: NonNegative = 1e-6
    """Added to the standard deviation."""


class ReinforcePlusPlus(PolicyLoss):
    """REINFORCE++ (arXiv 2501.03262): rewards normalised over the batch, PPO clip."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """The algorithm."""
    whiten_advantages: bool = True
    """Subtract the mean of the batch's token advantages and divide by their standard deviation."""
    gamma: Share = 1.0
    """Discount per model token. Tokens of an environment between two turns are skipped and discount nothing; in verl
    the tokens before them get nothing of what comes after."""
    std_eps: NonNegative = 1e-6
    """Added to the standard deviation."""


class Reinforce(PolicyLoss):
    """REINFORCE returns with PPO clip; rewards optionally normalised."""

    name: Literal["reinforce"] = "reinforce"
    """The algorithm."""
    gamma: Share = 1.0
    """Discount per model token; tokens of an environment between two turns are skipped and discount nothing."""
    norm_mean_type: Literal["batch", "group"] | None = None
    """Rewards minus the mean of the batch or group; null: off."""
    norm_std_type: Literal["batch", "group"] | None = None
    """Rewards over the standard deviation of the batch or group; null: off."""
    std_eps: NonNegative = 1e-6
    """Added to the standard deviation."""


GRPO_SPEC = AlgorithmSpec(
    about="Group-relative policy optimisation: a response is compared with its siblings.",
    section=GRPO,
    make="hpcrl.algorithms.grpo:GRPOCredit",
    objective=POLICY_GRADIENT,
    compares_siblings=lambda section: True,
)

REINFORCE_PLUS_PLUS_SPEC = AlgorithmSpec(
    about="REINFORCE++: rewards normalised over the batch.",
    section=ReinforcePlusPlus,
    make="hpcrl.algorithms.reinforce_plus_plus:ReinforcePlusPlusCredit",
    objective=POLICY_GRADIENT,
)

REINFORCE_SPEC = AlgorithmSpec(
    about="REINFORCE returns, rewards optionally normalised.",
    section=Reinforce,
    make="hpcrl.algorithms.reinforce:ReinforceCredit",
    objective=POLICY_GRADIENT,
    compares_siblings=lambda section: "group" in (section.norm_mean_type, section.norm_std_type),
)
