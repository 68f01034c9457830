"""Evaluation alone: responses of a model to data.val, with any reward or environment, without trainers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpcrl.spec.kinds import PipelineSpec
from hpcrl.spec.problems import Problem

if TYPE_CHECKING:
    from hpcrl.controller.evaluation_run import EvaluationRun


def _check(config: Any) -> Iterator[Problem]:
    if config.data.val is None:
        text = "data.val: there is nothing to evaluate on; give files or a generated source"
        yield Problem(("data", "val"), text, (("pipeline",),))


def _work(config: Any) -> str:
    asked = config.eval
    how = "greedy" if asked.temperature == 0 else f"at temperature {asked.temperature:g}"
    return (
        f"evaluate on up to {asked.most_prompts} prompts, {asked.samples} response(s) each, {how}"
        f"{', deterministic' if config.deterministic else ''}"
    )


SPEC = PipelineSpec(
    about="Evaluation of a model on data.val, without training.",
    make="hpcrl.pipelines.evaluate:evaluate",
    check=_check,
    learns_from_rewards=False,
    learns=False,
    trains=False,
    batch_size=lambda config: config.eval.most_responses,
    work=_work,
)


def evaluate(run: EvaluationRun) -> None:
    """Generate and score the responses that are not stored yet, part by part, then write the results."""
    while prompts := run.next_prompts():
        run.store(run.respond(prompts))
    run.summarise()
