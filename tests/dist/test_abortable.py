"""A rank that waits for a lost rank continues before the library's own timeout; gloo replaces NCCL."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcrl.comm.transfer import blames_peer
from hpcrl.messaging.abortable import BLOCKING_WAIT, AbortableGroup, GroupLost, blocking_wait
from tests.bench.gpu.peers import SURVIVED, pair
from tests.dist.conftest import SIZE, Threads

LIBRARY_S = 6.0  # gloo's own timeout
RANKS = range(SIZE)


class ByBroadcast:
    """Gloo transfers that report their end like NCCL's; gloo's own report it only to a waiting rank. A rank's data goes
    to all others."""

    def __init__(self, gloo: Any, rank: int):
        self._gloo, self._rank, self.abort = gloo, rank, gloo.abort

    def send(self, tensors: list[torch.Tensor], dest: int, tag: int) -> Any:
        return self._from(self._rank, tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return self._from(source, tensors)

    def _from(self, root: int, tensors: list[torch.Tensor]) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._gloo.broadcast(tensors, options)


def groups(threads: Threads, name: str, timeout_s: float = 30.0) -> tuple[list[ByBroadcast], list[AbortableGroup]]:
    """A group of all ranks as seen by each rank: the library's group and its wrapper."""
    worlds = [replace(world, timeout_s=LIBRARY_S / 0.8) for world in threads.worlds]
    plain = threads.every(lambda rank: ByBroadcast(worlds[rank].group(name, RANKS, 0), rank))
    return plain, [AbortableGroup(plain[i], name, RANKS, timeout_s, worlds[i].lost_ranks) for i in RANKS]


def test_sent_data_arrives_and_library_errors_are_raised(threads: Threads) -> None:
    _, made = groups(threads, "sound")

    def publish(rank: int) -> torch.Tensor:
        tensor = torch.full((1000,), float(rank))
        work = made[1].send([tensor], 0, 0) if rank == 1 else made[rank].recv([tensor], 1, 0)
        assert work.wait()
        return tensor

    assert all(torch.equal(tensor, torch.ones(1000)) for tensor in threads.every(publish))
    with pytest.raises((RuntimeError, ValueError), match=r"root|rank"):
        made[0].recv([torch.zeros(1)], 7, 0).wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "timeout_s", "own_s", "why"),
    [
        ({2}, 30.0, None, "rank 2 is lost"),
        ({7}, 0.6, None, "no answer for 0.6 s"),  # a rank of another replica
        (None, 30.0, 0.6, "no answer for 0.6 s"),
    ],
)
def test_waiting_for_a_rank_that_never_comes_ends(
    threads: Threads, told: set[int] | None, timeout_s: float, own_s: float | None, why: str, request: Any
) -> None:
    """Rank 2 never sends. A second wait on an aborted group ends at once."""
    plain, made = groups(threads, request.node.name, timeout_s)
    group = made[1]
    if told is not None:
        threading.Timer(0.2, threads.worlds[0].tell_lost, [told]).start()
    started = time.monotonic()
    with pytest.raises(GroupLost, match=why) as lost:
        group.recv([torch.zeros(4)], 2, 0).wait(None if own_s is None else timedelta(seconds=own_s))
    assert blames_peer(lost.value)
    assert time.monotonic() - started < LIBRARY_S - 1.0
    with pytest.raises(GroupLost, match=why):
        group.send([torch.zeros(4)], 0, 0)
    for rank in (0, 2):  # gloo would wait for them at its end
        plain[rank].recv([torch.zeros(4)], 2, 0)


@pytest.mark.parametrize("before", [None, "0"])
def test_only_groups_made_inside_have_no_watchdog(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    if before is not None:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    with blocking_wait():
        assert os.environ[BLOCKING_WAIT] == "1"
    assert os.environ.get(BLOCKING_WAIT) == before


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_dead_peer_under_nccl_does_not_end_this_process(how: str) -> None:
    said = pair(how, "cuda")
    assert SURVIVED in said, said
    assert how == "dies" or "GroupLost: the group pair was aborted: rank 1 is lost" in said
