"""Online DPO (arXiv 2402.04792): a loss on pairs of the policy's own responses, which rewards rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpcrl.algorithms.pairs.spec import DPOConfig
from hpcrl.metrics.stats import Stat, Stats, scalar
from hpcrl.pipelines.dpo import methods_of_loss, unread_by_loss
from hpcrl.spec.kinds import PipelineSpec
from hpcrl.spec.problems import Path, Problem

if TYPE_CHECKING:
    from hpcrl.controller.batches import BatchHandle
    from hpcrl.controller.context import Run

GROUP_SIZE = ("rollout", "group_size")


def _check(config: Any) -> Iterator[Problem]:
    own: DPOConfig = config.section(DPOConfig)
    if own.spec.labelled:
        text = f"dpo.loss: {own.loss} needs answers that are labelled good or bad, and a group's rewards rank its "
        yield Problem(("dpo", "loss"), f"{text}responses; use a loss on pairs", (("pipeline",),))
    if config.rollout.group_size < 2 * own.pairs_per_group:
        pairs = f"{own.pairs_per_group} pair{'s' * (own.pairs_per_group > 1)}"
        text = f"rollout.group_size: {pairs} of a prompt's responses need at least {2 * own.pairs_per_group}, got "
        yield Problem(GROUP_SIZE, f"{text}{config.rollout.group_size}", (("dpo", "pairs_per_group"), ("pipeline",)))


def _unread(config: Any) -> Iterator[tuple[Path, Path, str]]:
    yield from unread_by_loss(config.section(DPOConfig))
    yield ("dpo", "batch_size"), ("pipeline",), "a step of the online_dpo pipeline has rollout.num_prompts prompts"
    yield ("dpo", "validation"), ("pipeline",), "the online_dpo pipeline validates on responses"


SPEC = PipelineSpec(
    about="Online DPO: the losses of dpo on pairs of the policy's own responses, ranked by reward.",
    make="hpcrl.pipelines.online_dpo:online_dpo",
    section=DPOConfig,
    section_key="dpo",
    check=_check,
    unread=_unread,
    methods=methods_of_loss,
    objective="hpcrl.algorithms.pairs.objective:make_objective",
    uses_reference=lambda config: config.section(DPOConfig).uses_reference,
    pairs_per_group=lambda config: config.section(DPOConfig).pairs_per_group,
)


def online_dpo(run: Run) -> None:
    """Train the policy of `run` to its last step. A step without pairs, whose groups all have equal rewards, changes no
    weight. Rollouts, validation and background work are as in rlvr()."""
    run.update_weights(run.first_step)
    if run.first_step == 0:
        run.log(0, run.evaluate(0))
    for step in run.steps():
        batch = run.rollouts.next(step)
        stats = [run.rollouts.stats, run.trainer.advantages(batch), _pair_stats(batch)]
        if batch.preferences:
            pairs = run.trainer.take_pairs(batch)
            chosen = (batch.sizes[pair.better].model for pair in batch.preferences)
            pairs.coefficients["_chosen_tokens"] = float(sum(chosen))
            stats += [run.reference.logprobs(pairs, into="ref_logprobs"), run.trainer.update(pairs)]
            run.trainer.drop(pairs)
        run.rollouts.store(batch, run.trainer)
        run.trainer.drop(batch)
        stats.append(run.update_weights(step))
        run.log(step, *stats, run.evaluate(step))
        run.checkpoint.maybe_save(step)


def _pair_stats(batch: BatchHandle) -> Stats:
    """The step's pairs, the groups that have none, and how much the rewards of a pair differ."""
    pairs = batch.preferences
    grouped = {batch.prompts[pair.better] for pair in pairs}
    return {
        "pairs/count": scalar(len(pairs)),
        "pairs/groups_without": scalar(len(set(batch.prompts.values())) - len(grouped)),
        "pairs/reward_margin": Stat(sum(pair.margin for pair in pairs), float(len(pairs))),
    }
