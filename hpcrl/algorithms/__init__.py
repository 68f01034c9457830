"""The algorithms by name. To add one, write its credit or objective and its section of the configuration, and list the
pair here (docs/algorithms.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcrl.algorithms.base import Algorithm, Credit, Objective
from hpcrl.algorithms.grpo import GRPOCredit
from hpcrl.algorithms.policy_gradient import PolicyGradient
from hpcrl.algorithms.reinforce import ReinforceCredit
from hpcrl.algorithms.reinforce_plus_plus import ReinforcePlusPlusCredit
from hpcrl.algorithms.sft import CrossEntropy
from hpcrl.config import Config, PolicyLoss

ALGORITHMS: dict[str, tuple[Callable[[Any], Credit], Callable[[Any, float], Objective]]] = {
    "grpo": (GRPOCredit, PolicyGradient),
    "reinforce": (ReinforceCredit, PolicyGradient),
    "reinforce_plus_plus": (ReinforcePlusPlusCredit, PolicyGradient),
}
"""Name -> (credit of a section, objective of a section and the temperature of the rollouts)."""


def make_algorithm(config: Config) -> Algorithm:
    """What a run trains with: the pair of its section `algorithm`, or cross entropy alone where nothing is rewarded."""
    if not config.reinforces:
        return Algorithm(CrossEntropy())
    return make_pair(config.algorithm, config.rollout.temperature or 1.0)


def make_pair(section: PolicyLoss, temperature: float = 1.0) -> Algorithm:
    """The pair of a section `algorithm`, for rollouts of this temperature; ValueError if its name is unknown."""
    name = getattr(section, "name", None)
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm.name={name} is unknown; there are {', '.join(ALGORITHMS)}")
    make_credit, make_objective = ALGORITHMS[name]
    return Algorithm(make_objective(section, temperature), make_credit(section))
