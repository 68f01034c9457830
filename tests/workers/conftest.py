"""Roles in a world of three threads: rank 0 gets events, rank 1 plays environments, rank 2 generates."""

from __future__ import annotations

import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

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
            message = worlds[0].events.get(10)
            assert message is not None
            events.append(message[2])
        return [event for event in events if event != LAST]

    def mail(self, rank: int, kind: type) -> list[Any]:
        """Messages that arrive in a rank's mailbox within a second."""
        items, deadline = [], time.monotonic() + 1
        while not items and time.monotonic() < deadline:
            items = self._threads.worlds[rank].mailbox.receive(kind, 0.1)
        return items

    def deltas(self) -> list[EnvObservation]:
        """What rank 1 has sent to rank 2 until now."""
        self.send(1, 2, [EnvObservation(-1, b"")])  # arrives after all earlier messages
        items: list[EnvObservation] = []
        while not items or items[-1].sample != -1:
            arrived = self._threads.worlds[2].mailbox.receive(EnvObservation, 10)
            assert arrived, "the mailbox got nothing more"
            items += arrived
        return items[:-1]

    def empty(self, rank: int) -> None:
        """Forget what rank 2 has sent to the mailbox of a rank until now."""
        self.send(2, rank, [EnvObservation(-1, b"")])  # arrives after all earlier messages
        mailbox = self._threads.worlds[rank].mailbox
        assert any(delta.sample == -1 for delta in mailbox.receive(EnvObservation, 10))
        for kind in (Turn, Response):
            mailbox.receive(kind)

    def send(self, source: int, dest: int, items: list[Any]) -> None:
        self._threads.worlds[source].mailbox.send(dest, items)


@pytest.fixture(scope="module")
def stage(threads: Threads, model_folder: Path) -> Stage:
    return Stage(threads, model_folder)
