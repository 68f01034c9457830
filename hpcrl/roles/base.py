"""What a role is, and what it sees of the rank that plays it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hpcrl.cluster.layout import RoleLayout
from hpcrl.comm.transfer import Fabric
from hpcrl.config import Config
from hpcrl.control.world import World
from hpcrl.metrics.stats import Stats
from hpcrl.rollout.batch import Batch


class Role(Protocol):
    """What a rank does in one role. A handler answers a command with Done, another event, or None for no answer."""

    @property
    def busy(self) -> bool:
        """Whether it has work that can get on without a message coming."""

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        """Command type -> handler(command, seq)."""

    def look_after(self) -> bool:
        """Advance asynchronous work without blocking; whether anything happened."""

    def close(self) -> None:
        """End what the role started."""


@runtime_checkable
class Answers(Protocol):
    """A role that pipelines may ask something with run.ask()."""

    def answer(self, question: str, values: dict[str, Any]) -> Stats:
        """Statistics of this rank, which are merged with those of the role's other ranks, all of which are asked. May
        fill fields of batches that lie on the rank."""


class Rank(Protocol):
    """The rank process (hpcrl.roles.worker.Worker) as its roles see it. Batches and groups are shared between them."""

    world: World
    config: Config
    layout: RoleLayout
    model_path: Path
    run_dir: Path
    batches: dict[int, Batch]
    fabrics: dict[str, Fabric]
    roles: dict[str, Role]

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded at the first call."""

    def emit(self, event: Any) -> None:
        """Send an event to the controller."""
