"""Reinforcement learning in environments: rlvr's step, with episodes of several turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpcrl.pipelines.rlvr import rlvr
from hpcrl.spec.kinds import PipelineSpec
from hpcrl.spec.problems import Problem

if TYPE_CHECKING:
    from hpcrl.controller.context import Run


def _check(config: Any) -> Iterator[Problem]:
    if not config.envs:
        text = "env: the agentic pipeline plays in environments, and none is given; give env.default.name"
        yield Problem(("env",), f"{text}, or use pipeline=rlvr", (("pipeline",),))


SPEC = PipelineSpec(
    about="Reinforcement learning in environments.",
    make="hpcrl.pipelines.agentic:agentic",
    check=_check,
)


def agentic(run: Run) -> None:
    """Train the policy of `run` to its last step. A sample is an episode with its environment's rewards; the model's
    tokens are trained. Its turns form one sequence (StarPO's trajectories, arXiv 2504.20073) or, with episode=steps,
    a separate sequence each. Everything else works as in rlvr(), including background work."""
    rlvr(run)
