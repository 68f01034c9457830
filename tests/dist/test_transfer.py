"""Rollout transfers between ranks: for any moves every bit arrives where it belongs; a dead peer is noticed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.comm.transfer import TransferGroup
from hpcrl.messaging.messages import Move
from tests.dist.conftest import SIZE, Threads

TOKEN_FIELDS = [
    (name, np.dtype(kind)) for name, kind in {"token_ids": "i4", "loss_mask": "?", "gen_logprobs": "f4"}.items()
]
BEHAVIOUR = ("gen_logprobs_behaviour", np.dtype(np.float32))
ROW_FIELDS = [("status", np.dtype(np.int8)), ("big", np.dtype(np.int64))]
RANKS = tuple(range(SIZE))
NOISE = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)


def values_of(sample: int, length: int, name: str, dtype: np.dtype) -> np.ndarray:
    """Arbitrary bits, including NaN and signed zeros, that identify one field of one sample."""
    count = 1 if name in dict(ROW_FIELDS) else length
    start = (sample * 7919 + zlib.crc32(name.encode())) % 4096
    raw = NOISE[start : start + count * dtype.itemsize]
    return (raw & 1).astype(bool) if dtype.kind == "b" else raw.copy().view(dtype)


def picker(lengths: dict[int, int], fields: Sequence[tuple[str, np.dtype]]) -> Callable[[Sequence[int]], dict]:
    return lambda samples: {
        name: [values_of(sample, lengths[sample], name, dtype) for sample in samples] for name, dtype in fields
    }


@pytest.fixture(scope="module")
def transfer_groups(threads: Threads) -> list[TransferGroup]:
    return threads.every(lambda rank: TransferGroup(threads.worlds[rank].group("fabric", RANKS, 0), RANKS))


PAIRS = st.lists(st.tuples(st.sampled_from(RANKS), st.sampled_from(RANKS)), unique=True)
SAMPLES = st.lists(st.integers(0, 40), max_size=5)  # lengths of the samples of one move


@settings(max_examples=60, deadline=None)
@given(pairs=PAIRS, sizes=st.lists(SAMPLES, min_size=SIZE * SIZE, max_size=SIZE * SIZE), truncated=st.booleans())
def test_every_bit_of_a_transfer_arrives(
    threads: Threads,
    transfer_groups: list[TransferGroup],
    pairs: list[tuple[int, int]],
    sizes: list[list[int]],
    truncated: bool,
) -> None:
    lengths = {place * 100 + i: length for place, size in enumerate(sizes) for i, length in enumerate(size)}
    moves = []
    for place, (source, dest) in enumerate(pairs):
        samples = [place * 100 + i for i in range(len(sizes[place]))]
        moves.append(Move(source, dest, samples, [lengths[s] for s in samples]))
    tokens = [*TOKEN_FIELDS, BEHAVIOUR] if truncated else TOKEN_FIELDS
    pick = picker(lengths, [*tokens, *ROW_FIELDS])
    received = threads.every(lambda rank: transfer_groups[rank].exchange(rank, moves, tokens, ROW_FIELDS, pick))
    for rank in RANKS:
        assert [move for move, _ in received[rank]] == [move for move in moves if move.dest == rank]
        for move, fields in received[rank]:
            assert list(fields) == [name for name, _ in [*tokens, *ROW_FIELDS]]
            for name, dtype in [*tokens, *ROW_FIELDS]:
                assert fields[name].dtype == dtype
                parts = [values_of(s, lengths[s], name, dtype).tobytes() for s in move.samples]
                assert fields[name].tobytes() == b"".join(parts), (move, name)


def test_values_kept_on_a_rank_have_the_same_form_as_sent_ones(
    threads: Threads, transfer_groups: list[TransferGroup]
) -> None:
    held = {"token_ids": [np.arange(6, dtype=np.int64)[::2]], "secret": [np.zeros(3)]}  # another dtype, not contiguous
    moves = [Move(0, 0, [1], [3]), Move(0, 1, [1], [3])]
    fields = [("token_ids", np.dtype(np.int32))]
    received = threads.every(lambda rank: transfer_groups[rank].exchange(rank, moves, fields, [], lambda _: held))
    (_, kept), (_, sent) = received[0][0], received[1][0]
    assert list(kept) == list(sent) == ["token_ids"]
    assert kept["token_ids"].dtype == sent["token_ids"].dtype == np.int32
    assert kept["token_ids"].tolist() == sent["token_ids"].tolist() == [0, 2, 4]


def test_unannounced_lengths_are_refused_before_anything_is_sent(transfer_groups: list[TransferGroup]) -> None:
    moves = [Move(0, 1, [1, 2], [3, 4])]
    held = {"token_ids": [np.zeros(3, dtype=np.int32), np.zeros(5, dtype=np.int32)]}
    with pytest.raises(ValueError, match=r"2 samples from rank 0 to 1: token_ids has 8 values where .* counted 7"):
        transfer_groups[0].exchange(0, moves, [("token_ids", np.dtype(np.int32))], [], lambda _: held)


def test_groups_with_different_names_epochs_or_ranks_do_not_mix(
    threads: Threads, transfer_groups: list[TransferGroup]
) -> None:
    def make(rank: int) -> list[TransferGroup]:
        pair = [TransferGroup(threads.worlds[rank].group("pair", (2, 0), 0), (2, 0))] if rank != 1 else []
        return [*pair, TransferGroup(threads.worlds[rank].group("fabric", RANKS, 1), RANKS)]

    made = threads.every(make)
    fields = [("token_ids", np.dtype(np.int32))]
    moves = [Move(0, 2, [7], [1])]
    for number, transfer_group in {
        1: [row[0] for row in made],
        2: [row[-1] for row in made],
        3: transfer_groups,
    }.items():
        held = {"token_ids": [np.array([number], dtype=np.int32)]}
        received = threads.every(
            lambda rank, transfer_group=transfer_group, held=held: (
                transfer_group[rank].exchange(rank, moves, fields, [], lambda _: held) if rank != 1 else []
            )
        )
        assert received[2][0][1]["token_ids"].tolist() == [number]


@pytest.mark.parametrize("order", list(itertools.permutations(RANKS)))
def test_first_contacts_in_a_triangle_do_not_deadlock(threads: Threads, order: tuple[int, ...]) -> None:
    # Of two ranks that meet for the first time the one with the lower port waits for the other: with one of these
    # orders, a waits for b, b for c, and c would for ever wait for what a has not sent.
    a, b, c = order
    moves = [Move(source, dest, [dest], [1]) for source, dest in ((a, b), (a, c), (b, c))]
    held = {"token_ids": [np.array([7], dtype=np.int32)]}
    fields = [("token_ids", np.dtype(np.int32))]
    epoch = 2 + list(itertools.permutations(RANKS)).index(order)
    groups = threads.every(lambda rank: replace(threads.worlds[rank], timeout_s=5).group("fabric", RANKS, epoch))
    own = [[move for move in moves if rank in (move.source, move.dest)] for rank in RANKS]
    received = threads.every(lambda r: TransferGroup(groups[r], RANKS).exchange(r, own[r], fields, [], lambda _: held))
    assert [len(received[rank]) for rank in order] == [0, 1, 2]


@pytest.mark.slow
def test_a_silent_member_is_awaited_for_the_configured_time(threads: Threads) -> None:
    fields = [("token_ids", np.dtype(np.int32))]

    groups = threads.every(lambda rank: replace(threads.worlds[rank], timeout_s=0.5).group("silent", RANKS, 0))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]ime(d )?out"):
        TransferGroup(groups[0], RANKS).exchange(0, [Move(1, 0, [1], [8])], fields, [], lambda _: {})
    assert 0.4 < time.monotonic() - start < 10


MEMBER = """
import json, os, sys, time
from pathlib import Path
import numpy as np
from hpcrl.messaging.bootstrap import ProcessInfo
from hpcrl.messaging.messages import Move
from hpcrl.comm.transfer import TransferGroup, PeerLost
from hpcrl.messaging.world import join
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
LENGTH, FIELDS = 1 << 20, [("token_ids", np.dtype(np.int32))]
world = join(ProcessInfo("rank", "agent", rank, 0, 1), 3, folder, start_s=60, store_s=60, command_s=20)
def make(ranks, epoch):
    return TransferGroup(world.group("fabric", ranks, epoch), ranks)
def exchange(fabric, *pairs):
    moves = [Move(source, dest, [1], [LENGTH]) for source, dest in pairs]
    held = {"token_ids": [np.full(LENGTH, rank, dtype=np.int32)]}
    got = fabric.exchange(rank, moves, FIELDS, [], lambda samples: held)
    return [int(fields["token_ids"].sum()) for _, fields in got]
fabric = make([0, 1, 2], 0)
sums = exchange(fabric, (0, 1), (1, 2), (2, 0))
(folder / f"ready_{rank}").touch()
if rank == 2:
    time.sleep(60)
start = time.monotonic()
try:
    exchange(fabric, (2, 0), (2, 1))
    error = ""
except PeerLost as caught:
    error = f"{caught.peer}: {caught}"
seconds = time.monotonic() - start
sums += exchange(make([0, 1], 1), (0, 1), (1, 0))
(folder / f"result_{rank}.tmp").write_text(json.dumps([error, seconds, sums]))
(folder / f"result_{rank}.tmp").rename(folder / f"result_{rank}")
while not all((folder / f"result_{r}").exists() for r in (0, 1)): time.sleep(.02)
world.leave()
os._exit(0)
"""


@pytest.mark.slow
def test_a_killed_member_is_noticed_and_the_group_rebuilt_without_it(tmp_path: Path) -> None:
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), str(tmp_path)], env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        )
        for rank in RANKS
    ]
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / f"ready_{rank}").exists() for rank in RANKS):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)  # they wait for what rank 2 does not send
        members[2].send_signal(signal.SIGKILL)
        assert [member.wait(40) for member in members] == [0, 0, -signal.SIGKILL]
    finally:
        for member in members:
            member.kill()
            member.wait()
    for rank, peer in ((0, 1), (1, 0)):
        error, seconds, sums = json.loads((tmp_path / f"result_{rank}").read_text())
        assert error.startswith("2: ")
        assert "Connection closed by peer" in error or "Connection reset by peer" in error
        assert 0 < seconds < 20  # the group's timeout
        assert sums == [(rank - 1) % SIZE << 20, peer << 20]
