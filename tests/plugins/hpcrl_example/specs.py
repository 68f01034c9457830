"""What the parts say of themselves. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcrl.algorithms.specs import POLICY_GRADIENT
from hpcrl.spec.fields import NonNegative, Positive, Section, Share
from hpcrl.spec.kinds import (
    AlgorithmSpec,
    EnvSpec,
    GenEngineSpec,
    PipelineSpec,
    RewardSpec,
    RoleSpec,
    TrainEngineSpec,
)
from hpcrl.spec.policy_loss import PolicyLoss
from hpcrl.spec.problems import Problem


class LeaveOneOut(PolicyLoss):
    """RLOO (arXiv 2402.14740): a response is compared with the mean of its siblings."""

    shrink: Share = 0.0
    """Share of the siblings' mean that is left out of the baseline."""


LEAVE_ONE_OUT = AlgorithmSpec(
    about="A response is compared with the mean of its siblings.",
    section=LeaveOneOut,
    make="hpcrl_example.parts:LeaveOneOutCredit",
    objective=POLICY_GRADIENT,
    compares_siblings=lambda section: True,
)


class VowelOptions(Section):
    """Options of the reward vowels."""

    most: Positive = 8
    """Vowels for a reward of 1."""


VOWELS = RewardSpec(about="The share of vowels.", make="hpcrl_example.parts:VowelReward", section=VowelOptions)

ECHO = EnvSpec(about="Says back what it heard, once.", make="hpcrl_example.parts:EchoEnv")


class NoisyConfig(Section):
    """A trainer that multiplies its learning rate."""

    factor: NonNegative = 1.0
    """Factor of the learning rate."""


NOISY = TrainEngineSpec(
    about="FSDP2 with another learning rate.",
    section=NoisyConfig,
    make="hpcrl_example.parts:make_noisy",
    plan="hpcrl.engines.train.fsdp2.memory:PLAN",
    resume_keys=("factor",),
)

COUNTING = GenEngineSpec(
    about="The native engine, which counts its bursts.",
    make="hpcrl_example.parts:make_counting",
    families=("qwen2",),
)

WITNESS = RoleSpec(
    about="A rank that looks on.",
    make="hpcrl_example.parts:WitnessRole",
    needed=lambda config: config.pipeline == "curriculum",
    least_ranks=lambda config: 0,
)


class CurriculumConfig(Section):
    """Reinforcement learning that ends early."""

    enough: Share = 1.0
    """Mean score at which the run ends."""


def _check(config: Any) -> Iterator[Problem]:
    if config.curriculum.enough == 0:
        text = "curriculum.enough: 0 is reached at once; use more"
        yield Problem(("curriculum", "enough"), text, (("pipeline",),))


CURRICULUM = PipelineSpec(
    about="Reinforcement learning that ends where the mean score is high enough.",
    make="hpcrl_example.parts:curriculum",
    section=CurriculumConfig,
    check=_check,
)
