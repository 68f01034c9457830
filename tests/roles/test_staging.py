"""A staged copy of the weights is as large as the model, so it stays no longer than it is needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import MappingProxyType

import pytest
import torch.distributed as dist

from hpcrl.cluster.layout import RoleLayout
from hpcrl.control.messages import Stage as StageWeights
from hpcrl.roles.trainer import TrainerRole
from tests.roles.conftest import LAYOUT, Stage

EPOCHS = itertools.count()


@pytest.fixture
def role(stage: Stage) -> Iterator[TrainerRole]:
    worker = stage.worker(2, {})
    worker.layout = RoleLayout(MappingProxyType(LAYOUT | {"generator": (1, 2)}), 3)  # one more than this process
    worker.world.default_group("staging", [2], next(EPOCHS))
    yield TrainerRole(worker)
    dist.destroy_process_group()


def stage_weights(role: TrainerRole, version: int, sources: list[int]) -> None:
    role.handlers()[StageWeights](StageWeights(version, sources), 1)


def test_the_last_replica_takes_the_copy_out_of_memory(role: TrainerRole) -> None:
    stage_weights(role, 1, [1, 2, 2])  # two of three replicas pull from this rank
    assert role._staged
    first, second = role.staged(1), role.staged(1)
    assert first is second and len(list(first[0].tensors())) > 0
    assert not role._staged
    with pytest.raises(AssertionError, match="1 is not staged, or pulled too often"):
        role.staged(1)
    stage_weights(role, 2, [2])
    with pytest.raises(AssertionError, match="1 is not staged"):
        role.staged(1)
    assert role.staged(2)


def test_a_rank_that_publishes_to_nobody_keeps_nothing(role: TrainerRole) -> None:
    stage_weights(role, 1, [1, 1])
    assert not role._staged
