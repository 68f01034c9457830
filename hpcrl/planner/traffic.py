"""Bytes that ranks send: trainers to each other in an optimizer step, and new weights to replicas over NCCL.

The bytes of a step, by purpose and by collective, are computed for NCCL's rings of p ranks and a tensor of n bytes: n
(p - 1) / p from each rank for an all-gather, a reduce-scatter or an all-to-all (n: all ranks' bytes together, or a
rank's bytes to exchange), and twice as many for an all-reduce. Gradient norms, counts and other collectives of a few
numbers are left out.

New weights travel in one group per replica, with all trainers. Not run here: the figures come from NCCL's source (2.30)
and from others' timings. Buffers of a communicator, each way: between nodes one for all peers (net.cc,
sharedNetBuffersInit); within a node one for each channel to a peer (p2p.cc: three protocols, 9.2 MiB, on the receiving
side).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import Config
from hpcrl.planner.memory_parts import samples_of_an_update
from hpcrl.spec.weight_layout import CHANNELS

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True)
class StepWork:
    """A data parallel rank's work in an optimizer step: the tokens of all its micro-batches, and the number of
    micro-batches."""

    num_tokens: int
    num_micro_batches: int

    @classmethod
    def of(cls, config: Config, num_data_parallel: int) -> StepWork:
        """The work if every sequence has the maximum length."""
        samples, longest = -(-samples_of_an_update(config) // num_data_parallel), config.max_row_tokens
        together = max(1, config.trainer.max_tokens_per_micro_batch // longest)
        return cls(samples * longest, -(-samples // together))


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in an optimizer step."""

    what: str
    collective: Collective
    num_bytes: int


def exchanged(what: str, collective: Collective, num_bytes: int, num_ranks: int) -> Iterator[Sent]:
    """Bytes that each of num_ranks ranks sends if they exchange num_bytes, as above; nothing for 0 bytes."""
    times = 2 if collective == "all_reduce" else 1
    if sent := times * num_bytes * (num_ranks - 1) // num_ranks:
        yield Sent(what, collective, sent)


def total_bytes(sent: Iterable[Sent], gloo: bool = False) -> int:
    """The sum. gloo: with an all-reduce instead of every reduce-scatter, which gloo lacks."""
    return sum(each.num_bytes * (2 if gloo and each.collective == "reduce_scatter" else 1) for each in sent)


NET_BYTES = CHANNELS * 16 * (128 << 10)
"""16 pieces of 128 KiB a channel."""
SEND_BYTES, RECEIVE_BYTES = 2 << 20, 10 << 20
"""Per channel to a GPU of the same node, in pieces of 2 MiB."""
PEERS_AT_ONCE = 8
"""A communicator that spans nodes and has at most this many ranks gives each rank as many channels as the communicator
has; with more ranks, each gets fewer (paths.cc, ncclTopoComputeP2pChannels)."""
COMMUNICATOR_S, RANK_S = 0.35, 0.0144
"""Seconds to make a communicator: topology, graphs, own connections; and per rank, to find the other ranks. 16 GPUs on
two nodes took 1.08 s, .51 of them once a process to load kernels, and .23 to find each other (NVIDIA/nccl#1412)."""


def seconds_to_make(num_ranks: int) -> float:
    """Seconds to make a communicator of this many ranks, without the connections between them."""
    return COMMUNICATOR_S + RANK_S * num_ranks


@dataclass(frozen=True)
class WeightGroups:
    """Maximum communicators and bytes of NCCL's buffers of a trainer and of a generator rank, and the seconds to make
    all communicators, one after another."""

    of_trainer: int
    of_generator: int
    trainer_bytes: int
    generator_bytes: int
    seconds: float


def weight_groups(config: Config, layout: RoleLayout) -> WeightGroups:
    """The groups of a layout whose ranks have a GPU each, and whose generators are not reached by the trainers' own
    gather."""
    trainers = layout.ranks["trainer"]
    home = {rank: number for number, node in enumerate(Placement.from_config(config, layout).nodes) for rank in node}
    at = Counter(home[rank] for rank in trainers)
    sent, received, seconds = Counter[int](), 0, 0.0
    for replica in layout.replicas:
        size, there = len({*trainers, *replica}), Counter(home[rank] for rank in replica)
        spans = len({*at, *there}) > 1
        channels = max(1, CHANNELS // -(-size // PEERS_AT_ONCE)) if spans else CHANNELS
        for node in at:
            sent[node] += _bytes(there, node, channels * SEND_BYTES)
        received = max(received, *(_bytes(at, node, channels * RECEIVE_BYTES) for node in there))
        seconds += seconds_to_make(size)
    return WeightGroups(len(layout.replicas), 1, max(sent.values()), received, seconds)


def _bytes(peers: Counter[int], node: int, of_a_peer: int) -> int:
    """Buffers of a rank on this node for its peers, counted by node."""
    return peers[node] * of_a_peer + NET_BYTES * (peers.total() > peers[node])
