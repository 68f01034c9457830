"""The algorithms by name; to add one, write its file and its section of the configuration, and list it here."""

from __future__ import annotations

from hpcrl.algorithms.base import Algorithm
from hpcrl.algorithms.grpo import GRPO
from hpcrl.algorithms.policy_gradient import PolicyGradient
from hpcrl.algorithms.reinforce import Reinforce
from hpcrl.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from hpcrl.config import PolicyLoss

ALGORITHMS: dict[str, type[PolicyGradient]] = {
    "grpo": GRPO,
    "reinforce": Reinforce,
    "reinforce_plus_plus": ReinforcePlusPlus,
}


def make_algorithm(config: PolicyLoss) -> Algorithm:
    """The algorithm of a section `algorithm` of the configuration; ValueError if its name is unknown."""
    name = getattr(config, "name", None)
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm.name={name} is unknown; there are {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name](config)
