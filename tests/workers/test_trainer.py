"""The trainer role: an algorithm built once, and an advantage estimator that sets sample weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from hpcrl.algorithms.interface import AdvantageEstimator, Algorithm, AllSum, RewardTable
from hpcrl.messaging.messages import Advantages, TrainStep
from hpcrl.metrics.stats import Stats, scalar
from hpcrl.rollout.batch import Batch
from hpcrl.workers.trainer import TrainerRole
from tests.engines.worlds import Weighted, make_batch
from tests.workers.conftest import Stage

EPOCHS = itertools.count()


@pytest.fixture
def role(stage: Stage) -> Iterator[TrainerRole]:
    worker = stage.worker(2, {"algorithm": {"advantage_estimator": "grpo", "kl_loss_coef": 0.1, "ppo_epochs": 2}})
    worker.world.default_group("training", [2], next(EPOCHS))
    yield TrainerRole(worker)
    dist.destroy_process_group()


class Halves(AdvantageEstimator):
    """Advantage 1, and half the weight for rewards of 0."""

    def assign(self, batch: Batch, table: RewardTable, all_sum: AllSum) -> Stats:
        batch.advantages, batch.returns = torch.ones(batch.num_tokens), torch.ones(batch.num_tokens)
        batch.weights = torch.where(batch.rewards == 0, 0.5, 1.0)
        return {"critic/halved": scalar(float(all_sum((batch.weights == 0.5).sum())))}


def test_the_schedule_counts_the_optimizer_steps_of_the_objective(role: TrainerRole) -> None:
    assert role.engine.total_steps == 2 * role._worker.config.max_steps


def test_sample_weights_changed_by_the_estimator_are_reported(role: TrainerRole) -> None:
    batch = make_batch([5, 6, 7])
    batch.rewards = torch.tensor([1.0, 0.0, 0.0])
    role._worker.batches[4] = batch
    role._algorithm = Algorithm(Weighted(), Halves())
    done = role.handlers()[Advantages](Advantages(4), 1)
    assert done.weights == [(1 << 24, 0.5), (2 << 24, 0.5)]
    assert done.stats["critic/halved"].total == 2.0 and done.stats["critic/advantages/*"].count == 2 + 3 + 4


def trained(stage: Stage, loss: dict[str, dict[str, float]]) -> tuple[list[torch.Tensor], set[str]]:
    """(the parameters after an optimizer step, the fields of weights) with this section `loss`."""
    worker = stage.worker(2, {"algorithm": {"advantage_estimator": "grpo", "kl_loss_coef": 0.1}, "loss": loss})
    worker.world.default_group("training", [2], next(EPOCHS))
    role = TrainerRole(worker)
    batch = worker.batches[4] = make_batch([5, 6, 7])
    batch.group_ids, batch.rewards = torch.tensor([1, 1, 2]), torch.tensor([1.0, 0.0, 0.5])
    batch.ref_logprobs = -0.5 * batch.loss_mask
    role.handlers()[Advantages](Advantages(4, domains={"maths": [1], "plain": [2]}), 1)
    role.handlers()[TrainStep](TrainStep(4, [[0, 2], [1]], float(batch.loss_mask.sum()), 3.0), 2)
    dist.destroy_process_group()
    return [p.detach().clone() for p in role.engine.model.parameters()], {n for n in batch.columns if "_weights" in n}


def test_default_weights_train_to_the_same_bits_and_others_do_not(stage: Stage) -> None:
    plain, none = trained(stage, {})
    same, nothing = trained(stage, {"default": {"policy": 1.0}, "maths": {"ce": 0.0}})
    other, fields = trained(stage, {"maths": {"ce": 0.1}})
    assert none == nothing == set() and fields == {"ce_weights"}
    assert all(map(torch.equal, plain, same)) and not all(map(torch.equal, plain, other))
