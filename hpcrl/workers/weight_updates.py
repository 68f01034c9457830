"""Bring new weights from trainers to generators: within one process, by the training engine's own gather if ranks have
both roles, else by sending owned shards to the ranks that require them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.comm.transfer import TransferGroup
from hpcrl.comm.weight_checksums import LoadedSums, add_sums, shard_checksums
from hpcrl.comm.weight_plan import arriving_dtype
from hpcrl.comm.weight_transfer import (
    SendSchedule,
    UpdateGroup,
    WeightReceiver,
    WeightSender,
    connect,
    receive_layout,
    send_layout,
)
from hpcrl.engines.gen.generation_engine import ReadsBackWeights
from hpcrl.messaging.messages import Done, UpdateWeights
from hpcrl.messaging.world import PEER_SHARE
from hpcrl.models.families import known_shape
from hpcrl.models.shape import ModelShape
from hpcrl.planner.generator import shares_weights
from hpcrl.planner.memory import shares_device
from hpcrl.spec.tables import GEN_ENGINES
from hpcrl.spec.weight_layout import RequiredSlices, TensorShards, keepable
from hpcrl.workers.generator import GeneratorRole
from hpcrl.workers.role import Rank, without
from hpcrl.workers.trainer import TrainerRole

SEND_TIMEOUT_FRACTION = 0.75
"""Fraction of the peer timeout that a trainer waits for one replica, because other replicas wait for the trainer."""


class WeightUpdate:
    """A rank's part in weight updates, which its roles determine. Every rank has one."""

    def __init__(self, worker: Rank):
        self._worker = worker
        self._channels: dict[int, UpdateGroup] = {}
        self._schedules: dict[bool, SendSchedule] = {}  # by whether frozen weights are left out
        self._receivers: dict[bool, WeightReceiver] = {}  # likewise
        self._filled: set[int] = set()  # replicas that have all weights, also frozen ones
        self._loaded: LoadedSums | None = None  # of the last update

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {UpdateWeights: self._update_weights}

    def open(self, transfer_group: TransferGroup, number: int) -> None:
        """Connect the trainers to a replica, and send it the weight layout. Called by all ranks of the group, once
        their roles are built."""
        rank, trainers = self._worker.world.rank, self._worker.layout.ranks["trainer"]
        replica = self._worker.layout.replicas[number]
        connect(transfer_group.group, transfer_group.ranks, rank, trainers, replica)
        if rank in trainers:
            engine = cast(TrainerRole, self._worker.roles["trainer"]).engine
            layout = [held.of(trainers) for held in engine.weight_layout()]
            if rank == trainers[0]:
                send_layout(transfer_group.group, transfer_group.ranks, layout, set(replica) - set(trainers))
        else:
            layout = receive_layout(transfer_group.group, transfer_group.ranks, trainers[0])
        needs = dict(zip(replica, self._needs(layout), strict=True))
        self._channels[number] = UpdateGroup(transfer_group.group, transfer_group.ranks, layout, needs)
        self._filled.discard(number)

    def _update_weights(self, command: UpdateWeights, seq: int) -> Done:
        in_part = self._keeps_weights and self._filled.issuperset(command.replicas)
        self._filled.update(command.replicas)
        if self._worker.layout.generates_on_trainers:
            self._gather(command.version, in_part)
            return Done(seq)
        return self._transfer(command, seq, in_part)

    def _gather(self, version: int, in_part: bool) -> None:
        """Load the training engine's weights into the generator, tensor by tensor; without frozen ones if in_part."""
        rank, layout = self._worker.world.rank, self._worker.layout
        engine = cast(TrainerRole, self._worker.roles["trainer"]).engine
        held = [item.of(layout.ranks["trainer"]) for item in engine.weight_layout()]
        needs = self._needs(held)
        kept = _frozen(held, in_part)
        number, loaded = self._own_replica(), None
        named: Iterable[tuple[str, Tensor]]
        if number is not None and (alone := self._generator.trainer) is not None:
            named = [(name, tensor) for name, tensor in alone.weights() if name not in kept]
        else:
            pairs = zip(held, needs[0], strict=True)
            dtypes = {item.name: getattr(torch, arriving_dtype(item, need)) for item, need in pairs}
            named = engine.named_weights(dtypes, *([kept] if kept else []))
        if number is not None:
            index = layout.replicas[number].index(rank)
            loaded = self._load(named, version, held, needs[index], kept)
        for _ in named:  # ranks without a generator take part in the collective
            pass
        if self._worker.config.check_weights:
            sums = shard_checksums(rank, held, needs, engine.local_shards())
            dist.all_reduce(sums)
            if loaded is not None:
                self._compare(loaded, sums[index], version)

    def _transfer(self, command: UpdateWeights, seq: int, in_part: bool) -> Done:
        """Send owned shards and receive required ones; none of frozen tensors if in_part."""
        rank, layout = self._worker.world.rank, self._worker.layout
        sending, loaded = None, None
        if rank in layout.ranks["trainer"]:
            engine = cast(TrainerRole, self._worker.roles["trainer"]).engine
            if in_part not in self._schedules:
                self._schedules[in_part] = SendSchedule(rank, self._channels_of(in_part))
            send_timeout_s = SEND_TIMEOUT_FRACTION * PEER_SHARE * self._worker.world.timeout_s
            sending = WeightSender(self._schedules[in_part], command.replicas, engine.local_shards(), send_timeout_s)
        if (number := self._own_replica()) in command.replicas:
            channel = self._channels[number]
            if in_part not in self._receivers:
                self._receivers[in_part] = WeightReceiver(rank, self._channels_of(in_part)[number])
            named, kept = self._receivers[in_part].tensors(sending), _frozen(channel.layout, in_part)
            loaded = self._load(named, command.version, channel.layout, channel.needs[rank], kept)
            for _ in named:
                pass
        elif sending is not None:
            sending.finish()
        errors = sending.errors if sending is not None else {}
        if self._worker.config.check_weights:
            errors |= self._check([n for n in command.replicas if n not in errors], loaded, command.version)
        unreached: list[int] = []
        for number, error in errors.items():
            unreached += without(self._worker, layout.replicas[number], seq, error).unreached
        return Done(seq, unreached=sorted(unreached))

    def _check(self, replicas: list[int], loaded: LoadedSums | None, version: int) -> dict[int, RuntimeError]:
        """Compare this rank's checksums with the trainers'; return the errors of unreachable replicas."""
        rank, trainers, own = self._worker.world.rank, self._worker.layout.ranks["trainer"], self._own_replica()
        errors: dict[int, RuntimeError] = {}
        sums = torch.zeros(0)
        if rank in trainers:
            engine = cast(TrainerRole, self._worker.roles["trainer"]).engine
            held = next(iter(self._channels.values())).layout
            sums = shard_checksums(rank, held, self._needs(held), engine.local_shards())
        for number in replicas:
            if number in self._channels:
                try:
                    total = add_sums(self._channels[number], rank, trainers, sums)
                except RuntimeError as error:
                    if number == own:
                        raise
                    errors[number] = error
                    continue
                if number == own and loaded is not None:
                    self._compare(loaded, total, version)
        return errors

    def _compare(self, loaded: LoadedSums, expected: Tensor, version: int) -> None:
        if differing := loaded.differing(expected):
            rank = self._worker.world.rank
            raise RuntimeError(
                f"check_weights: {differing[0]} of weights {version} on generator rank {rank} is not what the trainers "
                f"have; {len(differing)} of {len(expected)} tensors differ"
            )

    def _load(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        layout: Sequence[TensorShards],
        needs: Sequence[RequiredSlices],
        kept: Collection[str],
    ) -> LoadedSums | None:
        """Load the tensors as they arrive, all but `kept`; return the checksums of all tensors if check_weights is
        set."""
        engine, alone = self._generator.engine, self._generator.trainer
        load: Callable[..., None] = engine.load_weights if alone is None else alone.load
        loaded = LoadedSums(layout, needs) if self._worker.config.check_weights else None
        if loaded is not None and self._loaded is not None:
            loaded.keep(self._loaded, kept)
        self._loaded = loaded
        given = named if loaded is None else loaded.noting(named)
        load(given, version, *([kept] if kept else []))
        if loaded is not None and isinstance(engine, ReadsBackWeights):
            for _ in loaded.noting(engine.loaded_weights([held.name for held in layout])):
                pass
        if self._worker.config.rollout.on_new_weights == "recompute":
            engine.recompute()
        return loaded

    def _needs(self, layout: Sequence[TensorShards]) -> list[list[RequiredSlices]]:
        """For each rank of a replica, its required slices of every tensor."""
        config, size = self._worker.config, self._worker.layout.generator_tensor_parallel
        need, model = GEN_ENGINES[config.gen_engine].required_slices, self._model
        return [[need(config, model, held.name, held.shape, index, size) for held in layout] for index in range(size)]

    def _channels_of(self, in_part: bool) -> dict[int, UpdateGroup]:
        """By replica, the groups for updates with all weights or without frozen ones."""
        return {n: channel.without_frozen if in_part else channel for n, channel in self._channels.items()}

    @cached_property
    def _keeps_weights(self) -> bool:
        """Whether generators still have the weights of the last update when the next begins."""
        config, layout = self._worker.config, self._worker.layout
        sleeps = shares_device(config, layout) and not shares_weights(config, layout)
        return GEN_ENGINES[config.gen_engine].keeps_weights and not sleeps

    @cached_property
    def _model(self) -> ModelShape | None:
        """The model's parameters, if they are known."""
        return known_shape(self._worker.model_path)

    @property
    def _generator(self) -> GeneratorRole:
        return cast(GeneratorRole, self._worker.roles["generator"])

    def _own_replica(self) -> int | None:
        rank = self._worker.world.rank
        return next((i for i, replica in enumerate(self._worker.layout.replicas) if rank in replica), None)


def _frozen(layout: Sequence[TensorShards], in_part: bool) -> frozenset[str]:
    """The names of the tensors that an update leaves out."""
    return keepable(layout) if in_part else frozenset()
