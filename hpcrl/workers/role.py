"""The protocols of roles, and of the rank as its roles see it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hpcrl.cluster.layout import RoleLayout
from hpcrl.comm.transfer import TransferGroup, blames_peer
from hpcrl.config import Config
from hpcrl.messaging.messages import Done
from hpcrl.messaging.world import World
from hpcrl.metrics.stats import Stats
from hpcrl.rollout.batch import Batch


class Role(Protocol):
    """A rank's work in one role. A handler returns Done or another event as the answer, or None for no answer."""

    @property
    def busy(self) -> bool:
        """Whether the role has work that can proceed without a message."""

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        """Command type -> handler(command, seq)."""

    def poll(self) -> bool:
        """Advance asynchronous work without blocking; return whether anything happened."""

    def close(self) -> None:
        """Release the role's processes, threads and engines."""


@runtime_checkable
class Answers(Protocol):
    """A role that answers pipelines' questions (run.ask())."""

    def answer(self, question: str, values: dict[str, Any]) -> Stats:
        """This rank's statistics, which are merged over the role's ranks. May fill fields of the rank's batches."""


@runtime_checkable
class Serves(Protocol):
    """A role that answers requests of reward workers over HTTP (hpcrl.workers.serving)."""

    url: str


class Rank(Protocol):
    """The rank process (hpcrl.workers.rank_loop.Worker) as its roles see it; the roles share batches and groups.
    `services` maps each role that is built and serves requests to its ranks' addresses."""

    world: World
    config: Config
    layout: RoleLayout
    model_path: Path
    run_dir: Path
    batches: dict[int, Batch]
    transfer_groups: dict[str, TransferGroup]
    roles: dict[str, Role]
    services: dict[str, list[str]]

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded at the first call."""

    def emit(self, event: Any) -> None:
        """Send an event to the controller."""


def without(worker: Rank, ranks: Collection[int], seq: int, error: RuntimeError) -> Done:
    """The answer after a transfer without these ranks; raises `error` if the run needs them."""
    disposable = {rank for replica in worker.layout.free_replicas for rank in replica}
    if not blames_peer(error) or not disposable.issuperset(ranks):
        raise error
    return Done(seq, unreached=sorted(ranks))
