"""A rank's main loop: execute commands in order, and poll asynchronous work between them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from hpcrl.cluster.layout import RoleLayout
from hpcrl.comm.transfer import TransferGroup, blames_peer
from hpcrl.config import Config
from hpcrl.data.chat import bind
from hpcrl.messaging.messages import (
    Ask,
    BuildGroup,
    BuildRole,
    Done,
    Failed,
    Joined,
    Lost,
    Profile,
    Shutdown,
    Span,
    WithSpans,
)
from hpcrl.messaging.queues import ControlError, ReaderLost, StoreLost
from hpcrl.messaging.world import CONTROLLER_QUEUE, World
from hpcrl.models.families import vision_of
from hpcrl.node.devices import HIDDEN, VISIBLE, check_device
from hpcrl.node.numa import address_of, bind_to_gpu
from hpcrl.planner.generator import shares_weights
from hpcrl.planner.memory import shares_device
from hpcrl.rollout.batch import Batch
from hpcrl.spec.tables import ROLES
from hpcrl.system.files import is_storage_error
from hpcrl.system.log import UNSHOWN
from hpcrl.workers.allocator import grow_segments
from hpcrl.workers.checkpointing import Saving
from hpcrl.workers.exchange import Exchange
from hpcrl.workers.peaks import PHASES, Peaks
from hpcrl.workers.profiling import Profiling
from hpcrl.workers.role import Answers, Role, Serves
from hpcrl.workers.time_sharing import TimeSharing
from hpcrl.workers.weight_updates import WeightUpdate

logger = logging.getLogger(__name__)

IDLE_FIRST_S = 0.0005
BUSY_MOST_S, IDLE_MOST_S = 0.004, 1.0  # between two polls, with and without asynchronous work in some role
MAX_SPANS = 1024  # unreported commands of a rank that answers none of them


class Reported(Exception):
    """A command or a role's work has raised an exception, and the controller has been notified."""


class Worker:
    """One rank process: its roles and their shared state (batches, groups)."""

    def __init__(self, world: World, config: Config, layout: RoleLayout, model_path: Path, run_dir: Path):
        self.world, self.config, self.layout = world, config, layout
        self.model_path, self.run_dir = model_path, run_dir
        self.batches: dict[int, Batch] = {}
        self.transfer_groups: dict[str, TransferGroup] = {}
        self.roles: dict[str, Role] = {}
        self.services: dict[str, list[str]] = {}
        self._default_ranks: list[int] | None = None
        self._handlers: dict[type, Callable[[Any, int], Any]] = {
            BuildRole: self._build_role,
            BuildGroup: self._build_group,
            Ask: self._ask,
        }
        self._publishing = WeightUpdate(self)
        self._saving = Saving(self)
        self._profiling = Profiling(config.profile, run_dir, world.rank)
        self._handlers[Profile] = self._profiling.handle
        self._handlers |= Exchange(self).handlers() | self._publishing.handlers() | self._saving.handlers()
        self._peaks = Peaks()
        self._spans: deque[Span] | None = deque(maxlen=MAX_SPANS) if config.timeline.enabled else None  # not reported
        self._turns = TimeSharing(self.roles, shares_weights(config, layout)) if shares_device(config, layout) else None
        self._left = False

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Loaded on first use: rank 0 may still be writing the model folder when this rank joins."""
        from transformers import AutoTokenizer  # takes seconds; a reward rank does not need it

        given = self.config.data
        vision = vision_of(self.model_path, given.max_pixels)
        return bind(AutoTokenizer.from_pretrained(self.model_path), given.chat_template_kwargs, vision)

    def serve(self) -> None:
        """Join and execute commands until Shutdown. Reported after any exception, which ends the rank."""
        self.join()
        idle_s = IDLE_FIRST_S
        while not self._left:
            self.world.mailbox_server.wakeup.clear()
            # Always run both, because a role's own work must not wait for queued commands.
            if self.execute_one(0.0) | self._look_after():
                idle_s = IDLE_FIRST_S
            elif not self._left:
                self.world.mailbox_server.wakeup.wait(idle_s)
                busy = any(role.busy for role in self.roles.values())
                idle_s = min(BUSY_MOST_S if busy else IDLE_MOST_S, idle_s * 2)

    def join(self) -> None:
        """Notify the controller that this rank reads its inbox."""
        self.emit(Joined(self.world.host, os.getpid()))

    def run_pending(self) -> bool:
        """One round of the loop without waiting, for the controller, which gets its own rank's failures as events."""
        try:
            return self.execute_one(0.0) | self._look_after()
        except Reported:
            return True

    def emit(self, event: Any) -> None:
        """Send an event to the controller, with the commands executed since the last event that reports them."""
        if self._spans and isinstance(event, WithSpans):
            event.spans = list(self._spans)
            self._spans.clear()
        self.world.sender.send(CONTROLLER_QUEUE, event)

    def execute_one(self, timeout_s: float) -> bool:
        """Execute the next command if one arrives within timeout_s. Reported if it raises."""
        message = self.world.commands.get(timeout_s)
        for ended in self.world.commands.take_ended():
            if ended.how == "gap":  # only this rank can detect that commands are missing
                self.emit(Failed(0, "reading its commands", ended.why, "control"))
                raise Reported
        if message is None:
            return False
        started, (_, seq, command) = time.monotonic(), message
        name = type(command).__name__
        self.world.trace.enter(name, seq)
        if isinstance(command, Shutdown):
            self._left = True
            self.world.leave()
            self.emit(Done(seq))
            return True
        self._peaks.enter(command)
        with self._reporting(seq, name):
            if self._turns is not None:
                self._turns.enter(command)
            with self._profiling.span(f"{name} #{seq}"):
                answer = self._handlers[type(command)](command, seq)
        if isinstance(answer, Done) and type(command) in PHASES:
            answer.stats |= self._peaks.take()
        if self._spans is not None:
            self._spans.append((seq, started, time.monotonic() - started))
        self.world.trace.enter("idle", seq)
        if answer is not None:
            self.emit(answer)
        return True

    def close(self) -> None:
        """Close the roles; called once when the rank exits or fails."""
        self._saving.close()
        for role in self.roles.values():
            role.close()

    def _look_after(self) -> bool:
        happened, mailbox = False, self.world.mailbox
        while mailbox.broken:
            ended = mailbox.broken.pop()
            self.emit(Lost(ended.sender, ended.why))
        for name, role in self.roles.items():
            with self._reporting(0, f"the work of its {name} role"):
                happened |= role.poll()
        return happened

    @contextlib.contextmanager
    def _reporting(self, seq: int, what: str) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's code may call sys.exit
            logger.error("failed in %s", f"{what} #{seq}" if seq else what, exc_info=True)
            text = "".join(traceback.format_exception_only(error)).split()
            self.emit(Failed(seq, what, " ".join(text)[:2000], _kind(error)))
            raise Reported from error

    def _build_role(self, command: BuildRole, seq: int) -> Done:
        started, spec = time.perf_counter(), ROLES[command.role]
        if self.world.rank in self.layout.ranks_with_model and self.config.debug != "fake":
            check_device(os.environ.get(VISIBLE, HIDDEN), torch.cuda.is_available(), torch.__version__)
            grow_segments(os.environ)
            if self.config.cluster.numa == "auto" and torch.cuda.is_available():
                bind_to_gpu(address_of(torch.cuda.get_device_properties(0)), self.config.cluster.threads_per_rank)
        if spec.owns_default_group:
            if self._default_ranks is None:
                self.world.default_group(command.role, command.ranks, command.epoch)
                self._default_ranks = command.ranks
            elif self._default_ranks != command.ranks:
                raise ValueError(
                    f"{command.role} needs ranks {command.ranks} as its default group, but rank {self.world.rank} is "
                    f"in one over {self._default_ranks}; colocated engines must have the same ranks"
                )
        elif spec.forms_replicas and self._default_ranks is None:
            replica = list(self.layout.replica_of(self.world.rank))
            if len(replica) > 1:
                self.world.default_group(f"{command.role}/{replica[0]}", replica, command.epoch)
                self._default_ranks = replica
        self.services = command.services
        role = cast(Role, spec.load()(self))
        self.roles[command.role] = role
        self._handlers |= role.handlers()
        address = role.url if isinstance(role, Serves) else ""
        ready = f"{command.role} ready in {time.perf_counter() - started:.1f} s"
        logger.info(ready, extra=UNSHOWN)
        return Done(seq, texts=[ready], address=address)

    def _build_group(self, command: BuildGroup, seq: int) -> Done:
        build = self.world.group if command.replica is None else self.world.weights_group
        transfer_group = TransferGroup(build(command.name, command.ranks, command.epoch), tuple(command.ranks))
        self.transfer_groups[command.name] = transfer_group
        if command.replica is not None:
            self._publishing.open(transfer_group, command.replica)
        return Done(seq)

    def _ask(self, command: Ask, seq: int) -> Done:
        role = self.roles[command.role]
        if not isinstance(role, Answers):
            raise TypeError(f"the pipeline asks {command.question!r} of the role {command.role}, which has no answer()")
        return Done(seq, stats=role.answer(command.question, command.values))


def import_engines(config: Config, roles: Collection[str]) -> None:
    """Import the modules of these roles, so ranks import in parallel before they wait for each other."""
    for name in roles:
        if name in ROLES and (module := ROLES[name].imports(config)):
            importlib.import_module(module)


def _kind(error: BaseException) -> Literal["", "input", "storage", "numbers", "peer", "control"]:
    """The exception's kind (hpcrl.messaging.messages.Failed)."""
    if is_storage_error(error):
        return "storage"
    if isinstance(error, ValueError | OSError):
        return "input"
    if isinstance(error, FloatingPointError):
        return "numbers"
    if isinstance(error, StoreLost | ReaderLost) or blames_peer(error):
        return "peer"
    return "control" if isinstance(error, ControlError) else ""


def leave_default_group() -> None:
    """Destroy the default group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
