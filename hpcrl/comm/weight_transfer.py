"""Weight transfer from the trainer ranks that hold weights to the generator ranks that require them, in steps.

A trainer rank packs a step's messages, in the generator's dtype on the group's device, while the previous step's
messages are in flight. A generator rank loads a step's tensors while the next step's messages arrive. Each side holds
at most two steps' messages; the receiving side also holds the tensor that it assembles.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.comm.batched_p2p import Begun, Transfer, begin, make_communicator
from hpcrl.comm.weight_plan import BUCKET_BYTES, Piece, arriving_dtype, padded, plan_pieces
from hpcrl.spec.weight_layout import RequiredSlices, TensorShards, TensorSlice, full_slice, keepable

FIRST_STEP_TIMEOUT_FRACTION = 0.8
"""Fraction of the send timeout allowed in the first step; it rises to 1 in the last. Receivers process steps in order.
While a sender of early steps (a first pipeline stage) waits for a hung replica, healthy replicas do not yet receive
from senders of later steps, so these senders must time out later."""


@dataclass(frozen=True)
class UpdateGroup:
    """A group of all trainer ranks and one replica's ranks, and the plan of its updates. `needs` maps each rank of the
    replica to its required slices of every tensor of the layout."""

    group: Any  # ProcessGroupGloo or ProcessGroupNCCL, whose methods torch's stubs lack
    ranks: Sequence[int]
    layout: Sequence[TensorShards]
    needs: Mapping[int, Sequence[RequiredSlices]]

    @cached_property
    def steps(self) -> list[list[Piece]]:
        """See plan_pieces."""
        return plan_pieces(self.layout, self.needs, BUCKET_BYTES)

    @cached_property
    def without_frozen(self) -> UpdateGroup:
        """The same group for updates that leave out frozen tensors."""
        return replace(self, needs={rank: unfrozen(self.layout, needs) for rank, needs in self.needs.items()})

    @property
    def device(self) -> torch.device:
        """The device of the transferred tensors."""
        return _device(self.group)


def unfrozen(layout: Sequence[TensorShards], needs: Sequence[RequiredSlices]) -> list[RequiredSlices]:
    """The required slices without slices of tensors that generators keep."""
    pairs, kept = zip(layout, needs, strict=True), keepable(layout)
    return [RequiredSlices(need.dtype, ()) if held.name in kept else need for held, need in pairs]


def connect(group: Any, ranks: Sequence[int], rank: int, senders: Collection[int], receivers: Collection[int]) -> None:
    """Open the connections of later updates now: to connect to a rank that has been lost would block the other ranks.
    Called by all ranks of the group."""
    tokens = torch.zeros(2, dtype=torch.uint8, device=_device(group))
    make_communicator(group, tokens.device)
    # Two gloo ranks wait for each other to connect; in this order, ranks cannot wait in a circle.
    pairs = sorted({(s, r) for s in senders for r in receivers if s != r}, key=lambda pair: (sorted(pair), pair))
    own = [pair for pair in pairs if rank in pair]
    begin(group, [_between(ranks, rank, pair, tokens[:1], tokens[1:]) for pair in own]).wait()


def _between(ranks: Sequence[int], rank: int, pair: tuple[int, int], given: Tensor, place: Tensor) -> Transfer:
    """This rank's side of a transfer from the first rank of a pair to the second."""
    sender, receiver = pair
    if rank == sender:
        return Transfer(given, ranks.index(receiver), sends=True)
    return Transfer(place, ranks.index(sender), sends=False)


def send_layout(group: Any, ranks: Sequence[int], layout: Sequence[TensorShards], receivers: Collection[int]) -> None:
    """Send the list of tensors and their owners to the receivers, which call receive_layout()."""
    data = torch.frombuffer(bytearray(msgspec.msgpack.encode(layout)), dtype=torch.uint8).to(_device(group))
    for tensor in (torch.tensor([len(data)], device=data.device), data):
        begin(group, [Transfer(tensor, ranks.index(receiver), sends=True) for receiver in receivers]).wait()


def receive_layout(group: Any, ranks: Sequence[int], sender: int) -> list[TensorShards]:
    """The layout that `sender` sends with send_layout()."""
    size = torch.zeros(1, dtype=torch.int64, device=_device(group))
    begin(group, [Transfer(size, ranks.index(sender), sends=False)]).wait()
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=size.device)
    begin(group, [Transfer(data, ranks.index(sender), sends=False)]).wait()
    return msgspec.msgpack.decode(data.cpu().numpy().tobytes(), type=list[TensorShards])


@dataclass
class _Message:
    """Pieces in one buffer, which is sent to one or several ranks."""

    pieces: list[Piece]
    num_bytes: int
    receivers: list[tuple[int, int]] = field(default_factory=list)  # (key of the channel, rank)

    def has(self, pieces: Sequence[Piece]) -> bool:
        """Whether these pieces have the same contents as the message's pieces."""
        contents = [
            [(piece.tensor, piece.tensor_slice, piece.dtype) for piece in some] for some in (self.pieces, pieces)
        ]
        return contents[0] == contents[1]


class SendSchedule:
    """A trainer rank's sends in an update, which are the same in every update."""

    def __init__(self, rank: int, channels: Mapping[int, UpdateGroup]):
        self.rank, self.channels = rank, channels
        self.layout = next(iter(channels.values())).layout
        self.parts = [held.part_of(rank) for held in self.layout]
        holders = {holder for held in self.layout for _, some in held.parts for holder in some}
        self.steps: list[list[_Message]] = []
        planned: dict[int, UpdateGroup] = {}
        for key, channel in channels.items():
            alike = holders.isdisjoint(channel.needs)  # replicas that hold nothing have equal plans if needs are equal
            same = (k for k, c in planned.items() if alike and [*c.needs.values()] == [*channel.needs.values()])
            if (twin := next(same, None)) is not None:
                self._add_receivers(key, twin, dict(zip(planned[twin].needs, channel.needs, strict=True)))
                continue
            self._add_channel(key, channel)
            if alike:
                planned[key] = channel
        self.most_bytes = max(sum(message.num_bytes for message in messages) for messages in self.steps)

    def _add_receivers(self, key: int, twin: int, ranks: Mapping[int, int]) -> None:
        """Add another channel whose ranks get the messages of `twin`."""
        for message in itertools.chain.from_iterable(self.steps):
            message.receivers += [(key, ranks[receiver]) for other, receiver in message.receivers if other == twin]

    def _add_channel(self, key: int, channel: UpdateGroup) -> None:
        for number, all_pieces in enumerate(channel.steps):
            if number == len(self.steps):
                self.steps.append([])
            to: dict[int, list[Piece]] = defaultdict(list)
            for piece in all_pieces:
                if piece.sender == self.rank:
                    to[piece.receiver].append(piece)
            for receiver, pieces in to.items():
                message = next((m for m in self.steps[number] if m.has(pieces)), None)
                if message is None:
                    message = _Message(pieces, sum(padded(piece.num_bytes) for piece in pieces))
                    self.steps[number].append(message)
                message.receivers.append((key, receiver))


class WeightSender:
    """A trainer rank's side of one update.

    Args:
        weights: This rank's shards in layout order, without tensors of which it holds no shard.
        send_timeout_s: A channel fails if a step's sends take longer (see FIRST_STEP_TIMEOUT_FRACTION).

    `errors` has the first error of each failed channel. A failed channel gets no more messages; other channels
    continue.
    """

    def __init__(self, schedule: SendSchedule, keys: Collection[int], weights: Iterator[Tensor], send_timeout_s: float):
        self._schedule, self._patience_s = schedule, send_timeout_s
        self._keys = [key for key in schedule.channels if key in keys]
        self.errors: dict[int, RuntimeError] = {}
        self.own: dict[int, Tensor] = {}  # by step: messages to itself, if this rank also generates
        self._weights = weights
        self._held = (number for number, part in enumerate(schedule.parts) if part is not None)
        self._tensor: tuple[int, Tensor] | None = None
        self._done = 0
        device = schedule.channels[self._keys[0]].device if self._keys else torch.device("cpu")
        self._buffers = [torch.empty(schedule.most_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._works: dict[int, list[tuple[int, Begun]]] = defaultdict(list)

    def advance(self, channel: UpdateGroup, receives: Sequence[Transfer]) -> Begun:
        """Start the next step's sends and, in the same batch, these receives of the channel. In two batches, two ranks
        that send to each other could both wait to receive. RuntimeError if the channel has failed."""
        key = next(key for key in self._keys if self._schedule.channels[key] is channel)
        started = self._advance({key: receives})
        if key in self.errors:
            raise self.errors[key]
        return started[key]

    def finish(self) -> None:
        """Send all remaining steps, and exhaust `weights`."""
        while self._done < len(self._schedule.steps):
            self._advance({})
        for step in range(self._done):
            self._wait(step)
        for _ in self._weights:
            pass
        self._buffers.clear()

    def _advance(self, receives: Mapping[int, Sequence[Transfer]]) -> dict[int, Begun]:
        """Start the next step; returns the started transfers by channel."""
        step, self._done = self._done, self._done + 1
        self._wait(step - 2)
        start, places = 0, []
        for message in self._schedule.steps[step]:
            receivers = [(key, rank) for key, rank in message.receivers if key in self._keys and key not in self.errors]
            if receivers:
                places.append((message, receivers, self._buffers[step % 2][start : start + message.num_bytes]))
                start += message.num_bytes
        self._pack([(message.pieces, buffer) for message, _, buffer in places])
        transfers = {key: [*receives.get(key, ())] for key in self._keys if key not in self.errors}
        for _, receivers, buffer in places:
            for key, receiver in receivers:
                if receiver == self._schedule.rank:
                    self.own[step] = buffer
                else:
                    peer = self._schedule.channels[key].ranks.index(receiver)
                    transfers[key].append(Transfer(buffer, peer, sends=True))
        started = {}
        for key, some in transfers.items():
            try:
                started[key] = begin(self._schedule.channels[key].group, some)
            except RuntimeError as error:
                self.errors[key] = error
        self._works[step] = [*started.items()]
        return started

    def _pack(self, messages: list[tuple[list[Piece], Tensor]]) -> None:
        """Copy the pieces to their offsets in the buffers, tensor by tensor."""
        places = []
        for pieces, buffer in messages:
            for piece, view in zip(pieces, views(pieces, buffer), strict=True):
                places.append((piece, view))
        for piece, view in sorted(places, key=lambda place: place[0].tensor):
            part = self._schedule.parts[piece.tensor]
            assert part is not None, "the plan lets a rank send only shards that it holds"
            view.copy_(inside(self._draw(piece.tensor), piece.tensor_slice, part))

    def _draw(self, number: int) -> Tensor:
        while self._tensor is None or self._tensor[0] < number:
            self._tensor = next(self._held), next(self._weights).detach()
        return self._tensor[1]

    def _wait(self, step: int) -> None:
        """Wait until a step's messages are sent, because their buffer is needed again."""
        late = step / max(1, len(self._schedule.steps) - 1)
        deadline = time.monotonic() + self._patience_s * (
            FIRST_STEP_TIMEOUT_FRACTION + (1 - FIRST_STEP_TIMEOUT_FRACTION) * late
        )
        for key, work in self._works.pop(step, ()):
            if key in self.errors:
                continue
            try:
                work.wait(timedelta(seconds=deadline - time.monotonic()))
            except RuntimeError as error:
                self.errors[key] = error


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A piece's position in a step's messages."""

    step: int
    sender: int
    tensor_slice: TensorSlice
    place: int


class WeightReceiver:
    """A generator rank's receives in an update, which are the same in every update. `num_bytes` counts all messages."""

    def __init__(self, rank: int, channel: UpdateGroup):
        self.rank, self.channel = rank, channel
        self.pieces: list[dict[int, list[Piece]]] = []  # by step and sender, in message order
        self._arrivals: dict[int, list[_Arrival]] = defaultdict(list)  # by tensor
        for step, all_pieces in enumerate(channel.steps):
            pieces: dict[int, list[Piece]] = defaultdict(list)
            for piece in all_pieces:
                if piece.receiver == rank:
                    place = len(pieces[piece.sender])
                    self._arrivals[piece.tensor].append(_Arrival(step, piece.sender, piece.tensor_slice, place))
                    pieces[piece.sender].append(piece)
            self.pieces.append(pieces)
        self.sizes = [{s: sum(padded(p.num_bytes) for p in own) for s, own in pieces.items()} for pieces in self.pieces]
        self.num_bytes = sum(sum(sizes.values()) for sizes in self.sizes)

    def tensors(self, sending: WeightSender | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for each weight of which this rank requires slices. A tensor is valid until the next one
        is yielded. It has the weight's full shape; values outside the required slices are undefined. If this rank also
        sends, `sending` continues in step, and is finished after the last tensor. RuntimeError if a sender is lost."""
        arrived = _Arrived(self, sending)
        needed = self._needed()
        whole_bytes = max(
            (_num_bytes(held, dtype) for number, held, dtype in needed if not self._is_one(number)), default=0
        )
        whole = torch.empty(whole_bytes, dtype=torch.uint8, device=self.channel.device)
        for number, held, dtype in needed:
            if self._is_one(number):
                yield held.name, arrived.view(self._arrivals[number][0])
                continue
            tensor = whole[: _num_bytes(held, dtype)].view(dtype).view(held.shape)
            for arrival in self._arrivals[number]:
                view = arrived.view(arrival)
                inside(tensor, arrival.tensor_slice, full_slice(held.shape)).copy_(view)
            yield held.name, tensor
        if sending is not None:
            sending.finish()

    def _needed(self) -> list[tuple[int, TensorShards, torch.dtype]]:
        """(number, shards, received dtype) of each tensor of which this rank gets slices."""
        pairs = enumerate(zip(self.channel.layout, self.channel.needs[self.rank], strict=True))
        return [(i, held, getattr(torch, arriving_dtype(held, need))) for i, (held, need) in pairs if need.slices]

    def _is_one(self, number: int) -> bool:
        """Whether the tensor arrives as one piece and need not be assembled."""
        arrivals = self._arrivals[number]
        return len(arrivals) == 1 and arrivals[0].tensor_slice == full_slice(self.channel.layout[number].shape)


class _Arrived:
    """The messages of the current step, and a second buffer into which the next step's messages arrive."""

    def __init__(self, receiving: WeightReceiver, sending: WeightSender | None):
        self._of, self._sending, self._channel = receiving, sending, receiving.channel
        widest = max(sum(size for sender, size in s.items() if sender != receiving.rank) for s in receiving.sizes)
        self._buffers = [torch.empty(widest, dtype=torch.uint8, device=self._channel.device) for _ in range(2)]
        self._step = -1
        self._views: dict[int, list[Tensor]] = {}
        self._works: dict[int, Begun] = {}
        self._messages: dict[int, dict[int, Tensor]] = {}
        self._post(0)

    def view(self, arrival: _Arrival) -> Tensor:
        """The piece, after its step has arrived."""
        while self._step < arrival.step:
            self._next()
        return self._views[arrival.sender][arrival.place]

    def _next(self) -> None:
        self._step += 1
        step, rank = self._step, self._of.rank
        self._post(step + 1)
        self._works.pop(step).wait()
        messages = self._messages.pop(step)
        if rank in self._of.sizes[step]:
            assert self._sending is not None, "a rank that sends to itself has a sending side"
            messages[rank] = self._sending.own.pop(step)
        self._views = {sender: list(views(self._of.pieces[step][sender], data)) for sender, data in messages.items()}

    def _post(self, step: int) -> None:
        """Start a step's receives and this rank's own sends. The step that last used the buffer is already copied."""
        if step >= len(self._of.sizes):
            return
        start, receives, self._messages[step] = 0, [], {}
        for sender, size in self._of.sizes[step].items():
            if sender != self._of.rank:
                message = self._buffers[step % 2][start : start + size]
                self._messages[step][sender] = message
                receives.append(Transfer(message, self._channel.ranks.index(sender), sends=False))
                start += size
        if self._sending is None:
            self._works[step] = begin(self._channel.group, receives)
        else:
            self._works[step] = self._sending.advance(self._channel, receives)


def views(pieces: Sequence[Piece], message: Tensor) -> Iterator[Tensor]:
    """Views of the pieces in their message, in order."""
    start = 0
    for piece in pieces:
        dtype = getattr(torch, piece.dtype)
        shape = [last - first for first, last in piece.tensor_slice]
        yield message[start : start + piece.num_bytes].view(dtype).view(shape)
        start += padded(piece.num_bytes)


def inside(tensor: Tensor, tensor_slice: TensorSlice, part: TensorSlice) -> Tensor:
    """View of the slice `tensor_slice` of a weight, of which `tensor` is the slice `part`."""
    index = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(tensor_slice, part, strict=True))
    return tensor[index]


def _num_bytes(held: TensorShards, dtype: torch.dtype) -> int:
    return math.prod(held.shape) * dtype.itemsize


def _device(group: Any) -> torch.device:
    return torch.device("cpu" if isinstance(group, dist.ProcessGroupGloo) else "cuda")
