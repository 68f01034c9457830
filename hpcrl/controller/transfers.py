"""A transfer's commands: each rank gets only its own moves, in parts that fit into a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcrl.comm.transfer import ragged, ragged_bytes
from hpcrl.messaging.messages import Move, SendTokens, TransferRollouts
from hpcrl.rollout.types import TOKEN_REWARD
from hpcrl.spec.trajectory import Level, Origin, fields_of

PART_SAMPLES = 32_768
"""Maximum samples per message: id, length, bytes of messages, reward, score and number of turn rewards take at most 31
bytes per sample, in total less than 1 MiB. A baseline and a decoupled reward each take 4 more bytes, the flag of failed
episodes 1, a turn reward 4, a token reward 8."""


def rollout_transfers(
    batch: int,
    group: str,
    moves: Sequence[Move],
    dests: Collection[int],
    scored: Mapping[int, Mapping[str, Any]],
    fields: Sequence[str],
) -> Iterator[dict[int, TransferRollouts]]:
    """The commands that form a batch on `dests`: for each part, a dict from rank to command.

    Args:
        scored: The scorer's fields of each sample, by name.
        fields: Names of the generator's fields to transfer.
    """
    given = {name for values in scored.values() for name in values}
    of_rows = [f for f in fields_of(Origin.SCORER, Level.ROW) if f.name in given or not f.optional]
    of_turns = fields_of(Origin.SCORER, Level.TURN)
    of_tokens = [f for f in fields_of(Origin.SCORER, Level.TOKEN) if any(s.get(f.name) for s in scored.values())]
    most_turns = max((len(s[f.name]) for s in scored.values() for f in of_turns), default=0)
    token_bytes = max((len(s.get(f.name, b"")) for s in scored.values() for f in of_tokens), default=0)
    row_bytes = 31 + 4 * len({"baselines", "decoupled_rewards"} & given) + ("failed" in given)
    most = max(1, PART_SAMPLES * 31 // (row_bytes + 4 * most_turns + token_bytes))
    parts = _parts(moves, {*dests, *(move.source for move in moves)}, most)
    for number, part in enumerate(parts, 1):
        commands = {}
        for rank, own in part.items():
            gets = [scored[sample] for move in own if move.dest == rank for sample in move.samples]
            commands[rank] = TransferRollouts(
                batch=batch,
                group=group,
                moves=own,
                fields=list(fields),
                scored={
                    **{f.name: np.array([s[f.name] for s in gets], f.travels_as).tobytes() for f in of_rows},
                    **{f.name: ragged([s[f.name] for s in gets], f.travels_as) for f in of_turns},
                    **{f.name: ragged_bytes([s.get(f.name, b"") for s in gets], TOKEN_REWARD) for f in of_tokens},
                },
                forms=number == len(parts) and rank in dests,
            )
        yield commands


def token_transfers(
    batch: int,
    group: str,
    field: str,
    moves: Sequence[Move],
    ranks: Collection[int],
    dest: str = "trainer",
    width: int = 0,
) -> Iterator[dict[int, SendTokens]]:
    """The commands that send a token field to the ranks of the role `dest`: for each part, a dict from rank to command.
    `ranks` are all senders and receivers; `width` as in SendTokens."""
    for part in _parts(moves, ranks, PART_SAMPLES):
        yield {rank: SendTokens(batch, group, field, own, dest, width) for rank, own in part.items()}


def _parts(moves: Sequence[Move], ranks: Collection[int], most: int) -> list[dict[int, list[Move]]]:
    """The moves from or to each rank, split into parts of at most `most` samples per rank."""
    touched: Counter[int] = Counter()
    for move in moves:
        for rank in {move.source, move.dest}:
            touched[rank] += len(move.samples)
    count = max(1, -(-max(touched.values(), default=0) // most))
    parts: list[dict[int, list[Move]]] = []
    for number in range(count):
        part: dict[int, list[Move]] = {rank: [] for rank in sorted(ranks)}
        for move in moves:
            start, end = (len(move.samples) * at // count for at in (number, number + 1))
            if start == end:
                continue
            columns = (column[start:end] for column in (move.samples, move.lengths, move.text_bytes))
            piece = Move(move.source, move.dest, *columns)
            for rank in {move.source, move.dest}:
                part[rank].append(piece)
        parts.append(part)
    return parts
