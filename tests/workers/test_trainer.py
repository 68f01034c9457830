"""The trainer role: an algorithm built once, and an advantage estimator that sets sample weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from hpcrl.algorithms.interface import AdvantageEstimator, Algorithm, AllSum, RewardTable
from hpcrl.messaging.messages import Advantages
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
