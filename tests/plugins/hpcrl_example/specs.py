"""The specifications of the parts. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcrl.algorithms.spec import POLICY_GRADIENT
from hpcrl.engines.gen.native.spec import SPEC as NATIVE
from hpcrl.engines.gen.native.spec import NativeConfig
from hpcrl.engines.train.fsdp2.spec import SPEC as FSDP2
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.spec.division import Division, DivisionError
from hpcrl.spec.fields import Count, NonNegative, Positive, Section, Share
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
from hpcrl.spec.weight_layout import RequiredSlices


class LeaveOneOut(PolicyLoss):
    """RLOO (arXiv 2402.14740): a response is compared with the mean of the other group members."""

    shrink: Share = 0.0
    """Share of the siblings' mean that is left out of the baseline."""


LEAVE_ONE_OUT = AlgorithmSpec(
    about="A response is compared with the mean of its siblings.",
    section=LeaveOneOut,
    make="hpcrl_example.parts:LeaveOneOutAdvantage",
    objective=POLICY_GRADIENT,
    compares_group=lambda section: True,
)


class VowelOptions(Section):
    """Options of the reward vowels."""

    most: Positive = 8
    """Vowels for a reward of 1."""


VOWELS = RewardSpec(about="The share of vowels.", make="hpcrl_example.parts:VowelReward", section=VowelOptions)

ECHO = EnvSpec(about="Says back what it heard, once.", make="hpcrl_example.parts:EchoEnv")


class NoisyConfig(FSDP2Config):
    """A trainer that multiplies its learning rate."""

    factor: NonNegative = 1.0
    """Factor of the learning rate."""


NOISY = TrainEngineSpec(
    about="FSDP2 with another learning rate.",
    section=NoisyConfig,
    make="hpcrl_example.parts:make_noisy",
    plan="hpcrl.engines.train.fsdp2.memory:PLAN",
    resume_keys=("factor",),
    computes=FSDP2.computes,
    deterministic=True,
)

COUNTING = GenEngineSpec(
    about="The native engine, which counts its bursts.",
    make="hpcrl_example.parts:make_counting",
    section=NativeConfig,
    plan=NATIVE.plan,
    families=("qwen2",),
    deterministic=True,
)


class StagesConfig(Section):
    """A model of two matrices."""

    num: Count = 1
    """Ranks that share the model: 1, or 2 with a matrix each."""


def _divide(config: Any, num_ranks: int) -> Division:
    num = config.trainer.section(StagesConfig).num
    if num > 2 or num_ranks % num:
        text = f"trainer.stages.num: {num} stages of 2 matrices do not divide {num_ranks} ranks; use 1 or 2"
        raise DivisionError([Problem(("trainer", "stages", "num"), text, (("layout", "trainer", "num_ranks"),))])
    groups = tuple(tuple(range(first, first + num)) for first in range(0, num_ranks, num))
    weights = tuple(tuple(range(stage, num_ranks, num)) for stage in range(num))
    return Division(groups, tuple(group[-1] for group in groups), weights)


STAGES = TrainEngineSpec(
    about="A model of two matrices, which may be on two ranks.",
    section=StagesConfig,
    make="hpcrl_example.stages:make_trainer",
    division=_divide,
    resume_keys=("num",),
    computes=frozenset({"entropy"}),
    deterministic=True,
)


def _columns(config: Any, model: Any, name: str, shape: tuple[int, ...], index: int, num_ranks: int) -> RequiredSlices:
    """All of A, and a share of B's columns, in the trainer's type."""
    width = shape[1] if name == "A" else -(-shape[1] // num_ranks)
    first = 0 if name == "A" else index * width
    return RequiredSlices("", (((0, shape[0]), (first, min(first + width, shape[1]))),))


COLUMNS = GenEngineSpec(
    about="Generates with the model of the stages engine; ranks of a replica share its columns.",
    make="hpcrl_example.stages:make_generator",
    required_slices=_columns,
    tensor_parallel=True,
    deterministic=True,
)

WITNESS = RoleSpec(
    about="A frozen model that tells how likely it finds the responses.",
    make="hpcrl_example.parts:WitnessRole",
    holds_model=True,
    plan="hpcrl_example.parts:witness_parts",
    imports=lambda config: "transformers.models.qwen2.modeling_qwen2",
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
    roles=("witness",),
)
