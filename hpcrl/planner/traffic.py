"""Bytes that ranks send: trainers to each other in an optimizer step, and new weights to replicas over NCCL.

The bytes of a step, by purpose and by collective, are computed for NCCL's rings of p ranks and a tensor of n bytes. In
an all-gather, reduce-scatter or all-to-all, each rank sends n (p - 1) / p bytes, where n is the size of the full tensor
or, in an all-to-all, the bytes of one rank. An all-reduce sends twice as many. Gradient norms, counts and other
collectives of a few numbers are left out.

New weights are sent in one group per replica, which has all trainers. This was not run here: the figures come from
NCCL's source (2.30) and from timings by others. A communicator has, in each direction, one buffer for all peers on
other nodes (net.cc, sharedNetBuffersInit), and one buffer per channel to each peer on the same node (p2p.cc: on the
receiving side three protocols, 9.2 MiB).
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
    """A data-parallel rank's work in an optimizer step: its micro-batches, and the tokens in all of them."""

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
    """What each of num_ranks ranks sends if they exchange num_bytes, as computed above; nothing for 0 bytes."""
    times = 2 if collective == "all_reduce" else 1
    if sent := times * num_bytes * (num_ranks - 1) // num_ranks:
        yield Sent(what, collective, sent)


def total_bytes(sent: Iterable[Sent], gloo: bool = False) -> int:
    """The sum of bytes. With gloo, which has no reduce-scatter, an all-reduce counts instead."""
    return sum(each.num_bytes * (2 if gloo and each.collective == "reduce_scatter" else 1) for each in sent)


NET_BYTES = CHANNELS * 16 * (128 << 10)
"""16 pieces of 128 KiB per channel."""
SEND_BYTES, RECEIVE_BYTES = 2 << 20, 10 << 20
"""Per channel to a GPU on the same node, allocated in pieces of 2 MiB."""
PEERS_AT_ONCE = 8
"""In a communicator that spans nodes and has at most this many ranks, each peer gets all of the communicator's
channels; with more ranks, each peer gets fewer (paths.cc, ncclTopoComputeP2pChannels)."""
COMMUNICATOR_S, RANK_S = 0.35, 0.0144
"""Seconds to create a communicator (topology, graphs, own connections), and seconds per rank to find the other ranks.
16 GPUs on two nodes took 1.08 s: 0.51 s to load kernels, once per process, and 0.23 s to find each other
(NVIDIA/nccl#1412)."""


def seconds_to_make(num_ranks: int) -> float:
    """Seconds to create a communicator of this many ranks, without the connections between them."""
    return COMMUNICATOR_S + RANK_S * num_ranks


@dataclass(frozen=True)
class WeightGroups:
    """The number of communicators and the maximum bytes of NCCL buffers of a trainer and of a generator rank, and the
    seconds to create all communicators, one after another."""

    of_trainer: int
    of_generator: int
    trainer_bytes: int
    generator_bytes: int
    seconds: float


def weight_groups(config: Config, layout: RoleLayout) -> WeightGroups:
    """The groups of a layout in which every rank has a GPU and generators are not on trainer ranks."""
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
    """Bytes of buffers of a rank on this node. `peers` counts its peers by node."""
    return peers[node] * of_a_peer + NET_BYTES * (peers.total() > peers[node])
