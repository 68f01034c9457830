"""A pipeline for tests, outside RL, that reads a reference: pipeline=tests.e2e.anchored_sft:SPEC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.spec.fields import Positive, Section
from hpcrl.spec.kinds import PipelineSpec

if TYPE_CHECKING:
    from hpcrl.controller.context import Run


class AnchoredConfig(Section):
    """The pipeline's keys."""

    batch_size: Positive = 8
    """Rows per step."""


SPEC = PipelineSpec(
    about="Supervised fine-tuning with a KL term to the reference.",
    make="tests.e2e.anchored_sft:anchored_sft",
    section=AnchoredConfig,
    learns_from_rewards=False,
    objective="tests.e2e.anchored_loss:AnchoredLoss",
    batch_size=lambda config: config.own.batch_size,
    roles=("reference",),
)


def anchored_sft(run: Run) -> None:
    """Train to the last step."""
    for step in run.steps():
        batch = run.rows.next(step)
        stats = [run.rows.stats, run.reference.logprobs(batch, into="ref_logprobs"), run.trainer.update(batch)]
        run.trainer.drop(batch)
        run.log(step, *stats)
        run.checkpoint.maybe_save(step)
