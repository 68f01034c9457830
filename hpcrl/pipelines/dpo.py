"""Training on pairs of a chosen and a rejected answer, or on answers that are labelled good or bad."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpcrl.algorithms.pairs.spec import DPOConfig
from hpcrl.metrics.stats import Stats, scalar
from hpcrl.spec.kinds import PipelineSpec
from hpcrl.spec.problems import Path, Problem

if TYPE_CHECKING:
    from hpcrl.controller.batches import BatchHandle
    from hpcrl.controller.context import Run


def _check(config: Any) -> Iterator[Problem]:
    own: DPOConfig = config.section(DPOConfig)
    if own.spec.labelled and own.batch_size < 2:
        text = f"dpo.batch_size: {own.batch_size}, but the KL term of {own.loss} pairs each prompt with the answer of "
        yield Problem(("dpo", "batch_size"), f"{text}another row; use at least 2", (("dpo", "loss"),))


def _unread(config: Any) -> Iterator[tuple[Path, Path, str]]:
    yield from unread_by_loss(config.section(DPOConfig))
    yield ("dpo", "pairs_per_group"), ("pipeline",), "the rows of the dpo pipeline are pairs"
    if config.data.val is None:
        yield ("dpo", "validation"), ("data", "val"), "data.val is null"
    if config.validates_rows:
        cause, why = ("dpo", "validation"), "nothing is generated, since dpo.validation is pairs"
        for key in type(config.eval).model_fields:
            if key != "num_prompts":
                yield ("eval", key), cause, why
        for section in ("rollout", "generator", "reward", "env"):
            yield (section,), cause, why


def unread_by_loss(own: DPOConfig) -> Iterator[tuple[Path, Path, str]]:
    """The keys that a loss on pairs does not read, as PipelineSpec.unread."""
    for key in own.unread():
        yield ("dpo", key), ("dpo", "loss"), f"dpo.loss is {own.loss}"
    if not own.uses_reference:
        key, value = ("loss", own.loss) if not own.spec.reference else ("reference_free", "true")
        yield ("reference",), ("dpo", key), f"with dpo.{key}={value} there is no reference"


def methods_of_loss(config: Any) -> Iterator[str]:
    """The loss in the plan's words, as PipelineSpec.methods."""
    own: DPOConfig = config.section(DPOConfig)
    yield f"loss {own.loss}"
    yield f"beta {own.scale:g}"
    if own.sft_scale:
        yield f"sft_weight {own.sft_scale:g}"


SPEC = PipelineSpec(
    about="Training on pairs of answers: DPO, IPO, SimPO, ORPO, CPO, KTO.",
    make="hpcrl.pipelines.dpo:dpo",
    section=DPOConfig,
    check=_check,
    unread=_unread,
    methods=methods_of_loss,
    learns_from_rewards=False,
    rows=lambda config: "labelled" if config.section(DPOConfig).spec.labelled else "pairs",
    objective="hpcrl.algorithms.pairs.objective:make_objective",
    batch_size=lambda config: config.section(DPOConfig).batch_size,
    uses_reference=lambda config: config.section(DPOConfig).uses_reference,
    validates_rows=lambda config: config.section(DPOConfig).validation == "pairs",
)


def dpo(run: Run) -> None:
    """Train to the last step.

    In the background: a running save is committed while the run waits for validation responses
    (Checkpoints.commit_if_written); roles on rank 0 work during every wait (Worker.run_pending).
    """
    labelled = run.config.section(DPOConfig).spec.labelled
    for step in run.steps():
        batch = run.rows.next(step)
        stats = _prepare(run, batch, labelled) | run.trainer.update(batch)
        run.trainer.drop(batch)
        scores: Stats = {}
        if run.validates_at(step):
            if run.evaluation is not None:
                run.update_weights(step)
            scores = run.evaluate(step) or _validate(run, step, labelled)
        run.log(step, run.rows.stats, with_margin(stats), scores)
        run.checkpoint.maybe_save(step)


def _prepare(run: Run, batch: BatchHandle, labelled: bool) -> Stats:
    """Fill what the loss reads. The KL term of a labelled loss is the mean log-ratio of prompts with answers of other
    rows, at least 0."""
    stats = run.reference.logprobs(batch, into="ref_logprobs")
    if not labelled:
        chosen = (size.model for sequence, size in batch.sizes.items() if sequence % 2 == 0)
        batch.coefficients["_chosen_tokens"] = float(sum(chosen))
    else:
        mixed = run.rows.mixed(batch)
        run.reference.logprobs(mixed, into="ref_logprobs")
        ratio = run.trainer.loss_stats(mixed)["_log_ratio"]
        run.trainer.drop(mixed)
        batch.coefficients["kl"] = max(0.0, ratio.total / ratio.count)
    return stats


def _validate(run: Run, step: int, labelled: bool) -> Stats:
    """The statistics of the loss on held-out rows, as val/NAME."""
    started = time.perf_counter()
    if (batch := run.rows.held_out(step)) is None:
        return {}
    _prepare(run, batch, labelled)
    stats = with_margin(run.trainer.loss_stats(batch))
    run.trainer.drop(batch)
    found = {f"val/{name}": value for name, value in stats.items() if not name.startswith("_")}
    return found | {"time/val_step": scalar(time.perf_counter() - started)}


def with_margin(stats: Stats) -> Stats:
    """The statistics with rewards/margins, for rows that are not pairs the difference of mean rewards."""
    good, bad = stats.get("rewards/chosen"), stats.get("rewards/rejected")
    if "rewards/margins" in stats or good is None or bad is None or not (good.count and bad.count):
        return stats
    return stats | {"rewards/margins": scalar(good.total / good.count - bad.total / bad.count)}
