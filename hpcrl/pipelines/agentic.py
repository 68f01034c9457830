"""Reinforcement learning in environments: the step of rlvr, over episodes of several turns."""

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
    """Train the policy of `run` to its last step. A sample is an episode, of which the model's tokens are trained, with
    the rewards of its environment: its turns are one sequence (StarPO's trajectories, arXiv 2504.20073), or with
    episode=steps each a sequence of its own. All else, with what runs in the background, is that of rlvr()."""
    rlvr(run)
