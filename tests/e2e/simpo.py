"""A pipeline that trains on pairs without a reference, as a plug-in would add it; imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.spec.kinds import PipelineSpec

if TYPE_CHECKING:
    from hpcrl.controller.context import Run

NUM_PAIRS = 8


def train(run: Run) -> None:
    """A step is one batch of pairs."""
    for step in run.steps():
        batch = run.rows.next(step)
        stats = run.trainer.update(batch)
        run.trainer.drop(batch)
        run.log(step, run.rows.stats, stats)
        run.checkpoint.maybe_save(step)


SPEC = PipelineSpec(
    about="SimPO (arXiv 2405.14734).",
    make="tests.e2e.simpo:train",
    learns_from_rewards=False,
    rows="pairs",
    objective="tests.e2e.simpo_loss:SimPO",
    batch_size=lambda config: NUM_PAIRS,
)
