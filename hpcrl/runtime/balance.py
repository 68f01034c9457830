"""Who trains on what: rows to ranks, and each rank's rows to micro-batches. Pure functions of lengths, no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

LINEAR_COST = 24576
"""A sequence of L tokens costs LINEAR_COST * L + L^2: matrix products and attention of a model of the 7B class."""


def cost(length: int) -> int:
    """Relative time a sequence of `length` tokens takes in a forward or backward pass."""
    return LINEAR_COST * length + length * length


UNITS_PER_RANK = 4
"""Siblings are kept together until balancing has fewer than this many units per rank to choose from."""


def balance(
    lengths: Sequence[int], num_ranks: int, equal_counts: bool = False, groups: Sequence[int] | None = None
) -> list[list[int]]:
    """Row indices for each rank, ascending, with the ranks' costs near each other: every row is on exactly one rank.

    Largest differencing (Karmarkar and Karp 1982), deterministic. Fewer rows than ranks leave some ranks empty. With
    equal_counts the numbers of rows differ by at most one. Otherwise rows that have the same number in `groups` (they
    share a prompt, which a rank computes once) go to one rank, or in equal parts to a few ranks where there are not
    enough groups to balance with. ValueError if num_ranks < 1.
    """
    if num_ranks < 1:
        raise ValueError(f"cannot balance {len(lengths)} rows over {num_ranks} ranks")
    if equal_counts:
        return _merge_partitions(_blocks(lengths, num_ranks), num_ranks)
    units = _units(range(len(lengths)) if groups is None else groups, num_ranks)
    return _merge_partitions([[(sum(cost(lengths[row]) for row in rows), rows)] for rows in units], num_ranks)


def _units(groups: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The rows of each group, cut into as many parts as it takes to have UNITS_PER_RANK for every rank."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    parts = -(-UNITS_PER_RANK * num_ranks // max(1, len(members)))
    return [rows[part::parts] for rows in members.values() for part in range(min(parts, len(rows)))]


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


def micro_batches(
    lengths_per_rank: Sequence[Sequence[int]],
    max_tokens: int,
    groups_per_rank: Sequence[Sequence[int]] | None = None,
) -> list[list[list[int]]]:
    """Row indices per rank and micro-batch; every rank gets the same number of micro-batches, some of them empty.

    First fit by falling length: a micro-batch holds at most max_tokens, except that a longer sequence has one of its
    own. Rows with the same number in groups_per_rank stay together as far as max_tokens allows. Rows of a micro-batch
    are ascending. ValueError if max_tokens < 1.
    """
    if max_tokens < 1:
        raise ValueError(f"micro-batches of {max_tokens} tokens cannot hold a sequence; give at least 1")
    groups = groups_per_rank or [range(len(lengths)) for lengths in lengths_per_rank]
    packed = [
        _first_fit(lengths, max_tokens, numbers) for lengths, numbers in zip(lengths_per_rank, groups, strict=True)
    ]
    count = max(map(len, packed), default=0)
    return [bins + [[] for _ in range(count - len(bins))] for bins in packed]


def _first_fit(lengths: Sequence[int], max_tokens: int, groups: Sequence[int]) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for tokens, rows in sorted(_pieces(lengths, max_tokens, groups), key=lambda piece: (-piece[0], piece[1])):
        number = next((number for number, left in enumerate(room) if tokens <= left), len(bins))
        if number == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[number].extend(rows)
        room[number] -= tokens
    return [sorted(rows) for rows in bins]


def _pieces(lengths: Sequence[int], max_tokens: int, groups: Sequence[int]) -> list[tuple[int, list[int]]]:
    """(tokens, rows): each group, or what of it fits into a micro-batch."""
    pieces: list[tuple[int, list[int]]] = []
    latest: dict[int, int] = {}  # group -> its last piece
    for row, (length, group) in enumerate(zip(lengths, groups, strict=True)):
        number = latest.get(group)
        if number is None or pieces[number][0] + length > max_tokens:
            latest[group] = len(pieces)
            pieces.append((length, [row]))
        else:
            pieces[number] = (pieces[number][0] + length, [*pieces[number][1], row])
    return pieces
