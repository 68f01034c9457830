"""Reinforcement learning from verifiable rewards (PPO, GRPO, REINFORCE++, ...): one step on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.spec.kinds import PipelineSpec

if TYPE_CHECKING:
    from hpcrl.controller.context import Run

SPEC = PipelineSpec(about="Reinforcement learning from verifiable rewards.", make="hpcrl.pipelines.rlvr:rlvr")


def rlvr(run: Run) -> None:
    """Train the policy of `run` to its last step.

    In the background: with rollout.max_staleness above 0, replicas that do not train generate for later steps while the
    run waits for other ranks (RolloutLoop.background); a running save is committed while the run waits for responses
    (Checkpoints.commit_if_written); roles on rank 0 work during every wait (Worker.run_pending).
    """
    run.update_weights(run.first_step)
    if run.first_step == 0:
        run.log(0, run.evaluate(0))
    for step in run.steps():
        batch = run.rollouts.next(step)
        stats = [
            run.rollouts.stats,
            run.trainer.logprobs(batch, into="old_logprobs"),
            run.trainer.entropies(batch),
            run.reference.logprobs(batch, into="ref_logprobs"),
            run.teacher.teach(batch),
            run.critic.values(batch),
            run.trainer.advantages(batch),
            run.critic.update(batch),
            run.imitation.mix(batch),
            run.trainer.update(batch),
            run.reference.update(step, run.trainer),
            run.teacher.update(step, run.trainer),
        ]
        run.rollouts.store(batch, run.trainer)
        run.trainer.drop(batch)
        stats.append(run.update_weights(step))
        run.log(step, *stats, run.evaluate(step))
        run.checkpoint.maybe_save(step)
