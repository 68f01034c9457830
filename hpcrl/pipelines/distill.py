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
    if not any(weights.divergence for weights in config.loss.values()):
        text = "loss: the distill pipeline learns from a teacher, and every domain's divergence is 0; raise one"
        yield Problem(("loss",), f"{text}, or use pipeline=rlvr", (("pipeline",),))


SPEC = PipelineSpec(
    about="On-policy distillation: the policy generates, and a teacher judges every token.",
    make="hpcrl.pipelines.distill:distill",
    check=_check,
    roles=("teacher",),
    needs_reward=False,
    loss_weights={"policy": 0.0, "divergence": 1.0},
)


def distill(run: Run) -> None:
    """Train the policy of `run` to its last step on its own responses, or episodes, and the teacher's judgement of
    their tokens. Rewards are optional, and only logged unless a domain has loss.NAME.policy. Everything else works as
    in rlvr(), including background work."""
    rlvr(run)
