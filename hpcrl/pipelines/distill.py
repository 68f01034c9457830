"""On-policy distillation: rlvr's step, in which a teacher judges every token that the policy has generated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpcrl.pipelines.rlvr import rlvr
from hpcrl.spec.kinds import PipelineSpec
from hpcrl.spec.problems import Problem

if TYPE_CHECKING:
    from hpcrl.controller.context import Run


def _check(config: Any) -> Iterator[Problem]:
    if config.learns and not config.algorithm_spec.uses_teacher(config.algorithm):
        name = getattr(config.algorithm, "advantage_estimator", "the algorithm")
        text = f"algorithm: {name} learns from rewards and not from a teacher; use algorithm=distill"
        yield Problem(("algorithm",), f"{text}, or pipeline=rlvr", (("pipeline",),))


SPEC = PipelineSpec(
    about="On-policy distillation: the policy generates, and a teacher judges every token.",
    make="hpcrl.pipelines.distill:distill",
    check=_check,
    roles=("teacher",),
    needs_reward=False,
)


def distill(run: Run) -> None:
    """Train the policy of `run` to its last step on its own responses, or episodes, and the log-probs that the teacher
    gives to their tokens. Rewards are optional and only logged. Everything else works as in rlvr(), including
    background work."""
    rlvr(run)
