"""Bring new weights from trainers to generators: within one process, by the training engine's own gather if ranks have
both roles, else by sending owned shards to the ranks that require them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from hpcrl.spec.tables import GEN_ENGINES
from hpcrl.spec.weight_layout import RequiredSlices, TensorShards
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
        self._schedule: SendSchedule | None = None
        self._receiving: WeightReceiver | None = None

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

    def _update_weights(self, command: UpdateWeights, seq: int) -> Done:
        if self._worker.layout.generates_on_trainers:
            self._gather(command.version)
            return Done(seq)
        return self._transfer(command, seq)

    def _gather(self, version: int) -> None:
        """Load the training engine's weights into the generator, tensor by tensor."""
        rank, layout = self._worker.world.rank, self._worker.layout
        engine = cast(TrainerRole, self._worker.roles["trainer"]).engine
        held = [item.of(layout.ranks["trainer"]) for item in engine.weight_layout()]
        needs = self._needs(held)
        number, loaded = self._own_replica(), None
        named: Iterable[tuple[str, Tensor]]
        if number is not None and (alone := self._generator.trainer) is not None:
            named = alone.weights()
        else:
            pairs = zip(held, needs[0], strict=True)
            dtypes = {item.name: getattr(torch, arriving_dtype(item, need)) for item, need in pairs}
            named = engine.named_weights(dtypes)
        if number is not None:
            index = layout.replicas[number].index(rank)
            loaded = self._load(named, version, held, needs[index])
        for _ in named:  # ranks without a generator take part in the collective
            pass
        if self._worker.config.check_weights:
            sums = shard_checksums(rank, held, needs, engine.local_shards())
            dist.all_reduce(sums)
            if loaded is not None:
                self._compare(loaded, sums[index], version)

    def _transfer(self, command: UpdateWeights, seq: int) -> Done:
        rank, layout = self._worker.world.rank, self._worker.layout
        sending, loaded = None, None
        if rank in layout.ranks["trainer"]:
            engine = cast(TrainerRole, self._worker.roles["trainer"]).engine
            self._schedule = self._schedule or SendSchedule(rank, self._channels)
            send_timeout_s = SEND_TIMEOUT_FRACTION * PEER_SHARE * self._worker.world.timeout_s
            sending = WeightSender(self._schedule, command.replicas, engine.local_shards(), send_timeout_s)
        if (number := self._own_replica()) in command.replicas:
            channel = self._channels[number]
            self._receiving = self._receiving or WeightReceiver(rank, channel)
            named = self._receiving.tensors(sending)
            loaded = self._load(named, command.version, channel.layout, channel.needs[rank])
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
        if self._schedule is not None:
            engine = cast(TrainerRole, self._worker.roles["trainer"]).engine
            held = self._schedule.layout
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
    ) -> LoadedSums | None:
        """Load the tensors as they arrive; return their checksums if check_weights is set."""
        engine, alone = self._generator.engine, self._generator.trainer
        load = engine.load_weights if alone is None else alone.load
        loaded = LoadedSums(layout, needs) if self._worker.config.check_weights else None
        load(named if loaded is None else loaded.noting(named), version)
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
