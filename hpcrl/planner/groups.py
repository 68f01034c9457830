"""The groups in which new weights travel over NCCL: one for each replica, with all trainers. Not run here: the figures
are those of NCCL's source (2.30) and of timings of others.

Buffers of a communicator, each way: between nodes one for all peers (net.cc, sharedNetBuffersInit); within a node one
for each channel to a peer (p2p.cc: those of three protocols, 9.2 MiB, on the receiving side).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import Config
from hpcrl.spec.weights import CHANNELS

NET_BYTES = CHANNELS * 16 * (128 << 10)
"""16 pieces of 128 KiB a channel."""
SEND_BYTES, RECEIVE_BYTES = 2 << 20, 10 << 20
"""For each channel to a GPU of the same node, in pieces of 2 MiB."""
PEERS_AT_ONCE = 8
"""Ranks of a communicator to each of which it gives as many channels as its own number, if it spans nodes (paths.cc,
ncclTopoComputeP2pChannels); of more ranks, each gets fewer."""
COMMUNICATOR_S, RANK_S = 0.35, 0.0144
"""Seconds to make a communicator: topology, graphs, own connections; and for each rank, to find the others. 16 GPUs
on two nodes took 1.08 s, .51 of them once a process to load kernels, and .23 to find each other (NVIDIA/nccl#1412)."""


def seconds_to_make(num_ranks: int) -> float:
    """Of a communicator of so many ranks, without the connections between them."""
    return COMMUNICATOR_S + RANK_S * num_ranks


@dataclass(frozen=True)
class WeightGroups:
    """Most communicators and bytes of NCCL's buffers of a trainer and of a generator rank, and the seconds to make all
    communicators, one after another."""

    of_trainer: int
    of_generator: int
    trainer_bytes: int
    generator_bytes: int
    seconds: float


def weight_groups(config: Config, layout: RoleLayout) -> WeightGroups:
    """Of a layout whose ranks have a GPU each, and whose generators are not reached by the trainers' own gather."""
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
