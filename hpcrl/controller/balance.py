"""Divide rows over ranks, and each rank's rows into micro-batches. Pure functions of lengths, without torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

LINEAR_COST = 24576
"""A sequence of L tokens costs LINEAR_COST * L + L^2: matrix products and attention of a 7B model."""


def cost(length: int) -> int:
    """Relative time of a forward or backward pass over a sequence of `length` tokens."""
    return LINEAR_COST * length + length * length


UNITS_PER_RANK = 4
"""Groups are split if there would otherwise be fewer than this many units (rows assigned together) per rank."""


Rows = list[int]
Together = Sequence[int | None]
"""For each row a number, equal for rows that must stay together (preference pairs); None for a single row."""


def balance(
    lengths: Sequence[int],
    num_ranks: int,
    groups: Sequence[int] | None = None,
    together: Together | None = None,
) -> list[list[int]]:
    """Assign every row to one rank, with similar costs per rank; returns ascending row indices for each rank.
    ValueError if num_ranks < 1.

    Largest differencing (Karmarkar and Karp 1982), deterministic. With fewer rows than ranks, some ranks get none. Rows
    with the same number in `groups` (they share a prompt, which a rank computes once) go to one rank, or in equal parts
    to a few ranks if there are too few groups; rows with the same number in `together` always go to one rank.
    """
    if num_ranks < 1:
        raise ValueError(f"cannot balance {len(lengths)} rows over {num_ranks} ranks")
    units = _units(range(len(lengths)) if groups is None else groups, _bundles(len(lengths), together), num_ranks)
    return _merge_partitions([[(sum(cost(lengths[row]) for row in rows), rows)] for rows in units], num_ranks)


def _bundles(num_rows: int, together: Together | None) -> list[Rows]:
    """The rows in order; rows that must stay together form one bundle, at the first row's place."""
    bundles: dict[tuple[int | None, int], Rows] = {}
    for row in range(num_rows):
        number = None if together is None else together[row]
        bundles.setdefault((number, row if number is None else -1), []).append(row)
    return list(bundles.values())


def _units(groups: Sequence[int], bundles: Sequence[Rows], num_ranks: int) -> list[Rows]:
    """Each group's rows, split into parts of whole bundles to reach UNITS_PER_RANK; a bundle belongs to the group of
    its first row."""
    members: dict[int, list[Rows]] = {}
    for rows in bundles:
        members.setdefault(groups[rows[0]], []).append(rows)
    parts = -(-UNITS_PER_RANK * num_ranks // max(1, len(members)))
    return [
        sorted(row for rows in inside[part::parts] for row in rows)
        for inside in members.values()
        for part in range(min(parts, len(inside)))
    ]


Partition = list[tuple[int, Rows]]
"""(cost, rows) per rank; ranks not listed are empty."""


def _merge_partitions(partitions: list[Partition], num_ranks: int) -> list[list[int]]:
    """Repeatedly merge the two partitions with the largest spread: heaviest part with lightest part, and so on."""
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
    together_per_rank: Sequence[Together] | None = None,
) -> list[list[Rows]]:
    """Row indices (ascending) per rank and micro-batch; every rank gets the same number of micro-batches, some of them
    empty. ValueError if max_tokens < 1.

    First fit by decreasing length: a micro-batch holds at most max_tokens, or one longer sequence. Rows with the same
    number in groups_per_rank stay together as far as max_tokens allows; rows with the same number in together_per_rank
    always do, in their own micro-batch if they are longer than max_tokens.
    """
    if max_tokens < 1:
        raise ValueError(f"micro-batches of {max_tokens} tokens cannot hold a sequence; give at least 1")
    groups = groups_per_rank or [range(len(lengths)) for lengths in lengths_per_rank]
    together = together_per_rank or [[None] * len(lengths) for lengths in lengths_per_rank]
    packed = [
        _first_fit(lengths, max_tokens, numbers, _bundles(len(lengths), tied))
        for lengths, numbers, tied in zip(lengths_per_rank, groups, together, strict=True)
    ]
    count = max(map(len, packed), default=0)
    return [bins + [[] for _ in range(count - len(bins))] for bins in packed]


def _first_fit(lengths: Sequence[int], max_tokens: int, groups: Sequence[int], bundles: Sequence[Rows]) -> list[Rows]:
    bins: list[Rows] = []
    room: list[int] = []
    for tokens, rows in sorted(_pieces(lengths, max_tokens, groups, bundles), key=lambda piece: (-piece[0], piece[1])):
        number = next((number for number, left in enumerate(room) if tokens <= left), len(bins))
        if number == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[number].extend(rows)
        room[number] -= tokens
    return [sorted(rows) for rows in bins]


def _pieces(
    lengths: Sequence[int], max_tokens: int, groups: Sequence[int], bundles: Sequence[Rows]
) -> list[tuple[int, Rows]]:
    """(tokens, rows) for each group, or for as many of its bundles as fit into a micro-batch."""
    pieces: list[tuple[int, Rows]] = []
    latest: dict[int, int] = {}  # group -> index of its last piece
    for rows in bundles:
        tokens, group = sum(lengths[row] for row in rows), groups[rows[0]]
        number = latest.get(group)
        if number is None or pieces[number][0] + tokens > max_tokens:
            latest[group] = len(pieces)
            pieces.append((tokens, rows))
        else:
            pieces[number] = (pieces[number][0] + tokens, pieces[number][1] + rows)
    return pieces
