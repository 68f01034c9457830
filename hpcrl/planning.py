"""Who trains on what: rows to ranks, and each rank's rows to micro-batches. Pure functions of lengths, no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

LINEAR_COST = 24576
"""A sequence of L tokens costs LINEAR_COST * L + L^2: matrix products and attention of a model of the 7B class."""


def cost(length: int) -> int:
    """Relative time a sequence of `length` tokens takes in a forward or backward pass."""
    return LINEAR_COST * length + length * length


def balance(lengths: Sequence[int], num_ranks: int, equal_counts: bool = False) -> list[list[int]]:
    """Row indices for each rank, ascending, with the ranks' costs near each other: every row is on exactly one rank.

    Largest differencing (Karmarkar and Karp 1982), deterministic. Fewer rows than ranks leave some ranks empty. With
    equal_counts the numbers of rows differ by at most one. ValueError if num_ranks < 1.
    """
    if num_ranks < 1:
        raise ValueError(f"cannot balance {len(lengths)} rows over {num_ranks} ranks")
    if equal_counts:
        return _merge_partitions(_blocks(lengths, num_ranks), num_ranks)
    return _merge_partitions([[(cost(n), [row])] for row, n in enumerate(lengths)], num_ranks)


Partition = list[tuple[int, list[int]]]
"""(cost, rows) of some ranks; ranks not listed are empty."""


def _blocks(lengths: Sequence[int], num_ranks: int) -> list[Partition]:
    """Rows by falling length, num_ranks at a time, each on its own rank: merging whole blocks keeps counts equal."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    return [
        [(cost(lengths[row]), [row]) for row in order[start : start + num_ranks]]
        for start in range(0, len(order), num_ranks)
    ]


def _merge_partitions(partitions: list[Partition], num_ranks: int) -> list[list[int]]:
    """Merge the two partitions with the largest spread, the heaviest part of one with the lightest of the other."""
    heap: list[tuple[int, int, Partition]] = []
    for number, parts in enumerate(partitions):
        full = sorted(parts + [(0, [])] * (num_ranks - len(parts)), key=lambda part: -part[0])
        heap.append((full[-1][0] - full[0][0], number, full))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        (_, _, heavy), (_, _, light) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, rows + more) for (a, rows), (b, more) in zip(heavy, reversed(light), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    if not heap:
        return [[] for _ in range(num_ranks)]
    return [sorted(rows) for _, rows in heap[0][2]]


def micro_batches(lengths_per_rank: Sequence[Sequence[int]], max_tokens: int) -> list[list[list[int]]]:
    """Row indices per rank and micro-batch; every rank gets the same number of micro-batches, some of them empty.

    First fit by falling length: a micro-batch holds at most max_tokens, except that a longer sequence has one of its
    own. Rows of a micro-batch are ascending. ValueError if max_tokens < 1.
    """
    if max_tokens < 1:
        raise ValueError(f"micro-batches of {max_tokens} tokens cannot hold a sequence; give at least 1")
    packed = [_first_fit(lengths, max_tokens) for lengths in lengths_per_rank]
    count = max(map(len, packed), default=0)
    return [bins + [[] for _ in range(count - len(bins))] for bins in packed]


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        number = next((number for number, left in enumerate(room) if lengths[row] <= left), len(bins))
        if number == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[number].append(row)
        room[number] -= lengths[row]
    return [sorted(rows) for rows in bins]
