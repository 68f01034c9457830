"""Supervised fine-tuning on the answers of the training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hpcrl.spec.fields import Positive, Section, Share
from hpcrl.spec.kinds import PipelineSpec
from hpcrl.spec.problems import Problem

if TYPE_CHECKING:
    from hpcrl.controller.context import Run


class SFTConfig(Section):
    """The supervised pipeline: token-mean cross entropy on the answers."""

    batch_size: Positive = 64
    """Rows per step."""
    stop_score: Share | None = None
    """End early once the sampled validation score reaches this value."""


def _check(config: Any) -> Iterator[Problem]:
    if config.sft.stop_score is not None and not config.evaluates:
        text = "sft.stop_score: needs validation; give data.val and eval_every above 0"
        yield Problem(("sft", "stop_score"), text, (("data", "val"), ("eval_every",)))


SPEC = PipelineSpec(
    about="Supervised fine-tuning on the answers of the training data.",
    make="hpcrl.pipelines.sft:sft",
    section=SFTConfig,
    check=_check,
    learns_from_rewards=False,
    objective="hpcrl.algorithms.cross_entropy:CrossEntropy",
    batch_size=lambda config: config.sft.batch_size,
)


def sft(run: Run) -> None:
    """Train to the last step, or until the sampled validation score reaches sft.stop_score.

    In the background: a running save is committed while the run waits for validation responses
    (Checkpoints.commit_if_written); roles on rank 0 work during every wait (Worker.run_pending).
    """
    config, stop_score = run.config, run.config.section(SFTConfig).stop_score
    for step in run.steps():
        if stop_score is not None and (score := _score(run.last_logged)) >= stop_score:
            run.end_at(step - 1, f"the validation score, {score:.3f}, has reached sft.stop_score={stop_score:g}")
            return
        batch = run.rows.next(step)
        stats = run.trainer.update(batch)
        run.trainer.drop(batch)
        scores = {}
        if run.evaluation is not None and config.eval_every and step % config.eval_every == 0:
            run.update_weights(step)
            scores = run.evaluate(step)
        run.log(step, run.rows.stats, stats, scores)
        run.checkpoint.maybe_save(step)


def _score(logged: Mapping[str, float | None]) -> float:
    """The last logged sampled validation score, also from before a resume; -1 if there is none."""
    score = logged.get("val/sampled/score/mean", logged.get("val/score/mean"))
    return -1.0 if score is None else score
