"""Roles in a world of three threads: rank 0 gets events, rank 1 plays environments, rank 2 generates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch.distributed as dist

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import TinyModel, parse
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.messaging.messages import EnvObservation, Joined, Response, Turn
from hpcrl.messaging.world import CONTROLLER_QUEUE, rank_queue
from hpcrl.workers.rank_loop import Worker
from tests.dist.conftest import Threads, threads

__all__ = ["threads"]

LAYOUT = {"controller": (0,), "trainer": (2,), "generator": (2,), "reference": (), "reward": (), "env": (1,)}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16), folder)
    return folder


GROUP_EPOCHS = itertools.count()


@pytest.fixture
def make_teaching(threads: Threads) -> Iterator[Any]:
    """Makes a trainer or a teacher of `pipeline=distill` on rank 2, which is alone in its group."""

    def role(kind: Any, folder: Path, temperature: float, **settings: Any) -> Any:
        given = {"pipeline": "distill", "model": {"path": str(folder)}, "rollout": {"temperature": temperature}}
        config = parse(given | settings)
        ranks = {**LAYOUT, "teacher": () if config.teacher_is_trainer else (2,)}
        layout = RoleLayout(MappingProxyType(ranks), 3)
        worker = Worker(threads.worlds[2], config, layout, folder, folder.parent)
        worker.world.default_group("training", [2], next(GROUP_EPOCHS))
        return kind(worker)

    yield role
    if dist.is_initialized():
        dist.destroy_process_group()


LAST = Joined("that was all", 0)


class Stage:
    """The world's workers, and their events at rank 0."""

    def __init__(self, threads: Threads, model_folder: Path):
        self._threads, self._model_folder = threads, model_folder

    def worker(self, rank: int, settings: dict[str, Any]) -> Worker:
        layout = RoleLayout(MappingProxyType(LAYOUT), 3)
        folder = self._model_folder
        return Worker(self._threads.worlds[rank], parse(settings), layout, folder, folder.parent)

    def command(self, rank: int, command: Any) -> None:
        """Put a command into a rank's inbox."""
        self._threads.worlds[0].sender.send(rank_queue(rank), command)

    def heard(self) -> list[Any]:
        """Events that have come to rank 0."""
        events, worlds = [], self._threads.worlds
        if (message := worlds[0].events.get(0.2)) is not None:
            events.append(message[2])
        for world in worlds:  # comes after all that a rank has sent
            world.sender.send(CONTROLLER_QUEUE, LAST)
        while events.count(LAST) < len(worlds):
            message = worlds[0].events.get(20)
            assert message is not None
            events.append(message[2])
        return [event for event in events if event != LAST]

    def mail(self, rank: int, kind: type) -> list[Any]:
        """Messages of a kind that have been sent to a rank's mailbox until now."""
        mailbox, observations = self._threads.worlds[rank].mailbox, self._observations(rank)
        if kind is EnvObservation:
            return observations
        self.send(rank, rank, observations)
        return mailbox.receive(kind)  # type: ignore[no-any-return]

    def deltas(self) -> list[EnvObservation]:
        """Observations that have been sent to rank 2 until now."""
        return self._observations(2)

    def empty(self, rank: int) -> None:
        """Forget what has been sent to the mailbox of a rank until now."""
        for kind in (EnvObservation, Turn, Response):
            self.mail(rank, kind)

    def _observations(self, rank: int) -> list[EnvObservation]:
        """Observations for a rank, when all that has been sent to it until now has arrived."""
        worlds = self._threads.worlds
        for source in range(len(worlds)):
            self.send(source, rank, [EnvObservation(-1, b"")])  # arrives after what its rank has sent before
        items: list[EnvObservation] = []
        while sum(item.sample == -1 for item in items) < len(worlds):
            arrived = worlds[rank].mailbox.receive(EnvObservation, 20)
            assert arrived, "the mailbox got nothing more"
            items += arrived
        return [item for item in items if item.sample != -1]

    def send(self, source: int, dest: int, items: list[Any]) -> None:
        self._threads.worlds[source].mailbox.send(dest, items)


@pytest.fixture(scope="module")
def stage(threads: Threads, model_folder: Path) -> Stage:
    return Stage(threads, model_folder)
