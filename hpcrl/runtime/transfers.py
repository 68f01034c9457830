"""What every rank is told of a transfer: its own moves only, in parts that fit into a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from hpcrl.control.messages import HandOver, Move, SendTokens
from hpcrl.trajectory import Origin, fields_of

PART_SAMPLES = 32_768
"""Most samples that one message names: id, length, reward and score take 26 bytes at most, together less than 1 MiB."""


def hand_overs(
    batch: int,
    group: str,
    moves: Sequence[Move],
    dests: Collection[int],
    scored: Mapping[int, Mapping[str, float]],
    fields: Sequence[str],
) -> Iterator[dict[int, HandOver]]:
    """The commands that form a batch on `dests`, part by part, by rank. scored: the scorer's fields of each sample by
    name. fields: names of the generator's fields that travel."""
    by_scorers = fields_of(Origin.SCORER)
    parts = _parts(moves, {*dests, *(move.source for move in moves)})
    for number, part in enumerate(parts, 1):
        commands = {}
        for rank, own in part.items():
            gets = [scored[sample] for move in own if move.dest == rank for sample in move.samples]
            commands[rank] = HandOver(
                batch=batch,
                group=group,
                moves=own,
                fields=list(fields),
                scored={f.name: np.array([s[f.name] for s in gets], f.travels_as).tobytes() for f in by_scorers},
                forms=number == len(parts) and rank in dests,
            )
        yield commands


def token_transfers(
    batch: int, group: str, field: str, moves: Sequence[Move], ranks: Collection[int]
) -> Iterator[dict[int, SendTokens]]:
    """The commands that bring a token field to the ranks that train on it, part by part, by rank; `ranks` are all of
    both sides."""
    for part in _parts(moves, ranks):
        yield {rank: SendTokens(batch, group, field, own) for rank, own in part.items()}


def _parts(moves: Sequence[Move], ranks: Collection[int]) -> list[dict[int, list[Move]]]:
    """The moves that touch each rank, cut into as many parts as the rank with the most samples needs."""
    touched: Counter[int] = Counter()
    for move in moves:
        for rank in {move.source, move.dest}:
            touched[rank] += len(move.samples)
    count = max(1, -(-max(touched.values(), default=0) // PART_SAMPLES))
    parts: list[dict[int, list[Move]]] = []
    for number in range(count):
        part: dict[int, list[Move]] = {rank: [] for rank in sorted(ranks)}
        for move in moves:
            start, end = (len(move.samples) * at // count for at in (number, number + 1))
            if start == end:
                continue
            piece = Move(move.source, move.dest, move.samples[start:end], move.lengths[start:end])
            for rank in {move.source, move.dest}:
                part[rank].append(piece)
        parts.append(part)
    return parts
