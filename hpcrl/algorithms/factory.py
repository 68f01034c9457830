"""Creates the advantage estimator and objective with which a run trains."""

from __future__ import annotations

import inspect

from hpcrl.algorithms.interface import Algorithm, Objective
from hpcrl.algorithms.value_loss import ValueLoss
from hpcrl.config import Config
from hpcrl.spec.kinds import AlgorithmSpec
from hpcrl.spec.policy_loss import PolicyLoss
from hpcrl.spec.table import load


def make_algorithm(config: Config) -> Algorithm:
    """The objective of the run's pipeline, or the estimator and objective of its section `algorithm`."""
    if path := config.pipeline_spec.objective:
        return Algorithm(_make_objective(config, path))
    return make_pair(config.algorithm_spec, config.algorithm, config.rollout.temperature or 1.0)


def _make_objective(config: Config, path: str) -> Objective:
    """The objective of the run's pipeline, with the pipeline's section if it takes an argument."""
    make, section = load(path, f"the objective of pipeline={config.pipeline}"), config.pipeline_spec.section
    given = [config.section(section)] if section is not None and inspect.signature(make).parameters else []
    objective: Objective = make(*given)
    return objective


def make_value_loss(config: Config) -> ValueLoss:
    """The objective of the critic."""
    algorithm = config.algorithm
    return ValueLoss(config.critic.value_clip, algorithm.ppo_epochs, algorithm.num_mini_batches)


def make_pair(spec: AlgorithmSpec, section: PolicyLoss, temperature: float = 1.0) -> Algorithm:
    """The estimator and objective of a specification, for its section and for rollouts of this temperature."""
    objective = load(spec.objective, f"the objective of {spec.about}")
    return Algorithm(objective(section, temperature), spec.load()(section))
