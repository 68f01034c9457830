"""Transfers that start together: over gloo one by one, over a group with NCCL's rules in one batch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.comm.batched_p2p import Transfer, begin, make_communicator
from hpcrl.messaging.abortable import AbortableGroup, GroupLost
from tests.dist.conftest import SIZE, Threads
from tests.dist.like_nccl import WHOLE, LikeNCCL

CPU = torch.device("cpu")


def everyone_to_everyone(rank: int, order: int) -> tuple[list[Transfer], dict[int, Tensor]]:
    """Each rank sends its number to all others, with receives first or last."""
    places = {peer: torch.full((3,), -1.0) for peer in range(SIZE) if peer != rank}
    receives = [Transfer(place, peer, sends=False) for peer, place in places.items()]
    sends = [Transfer(torch.full((3,), float(rank)), peer, sends=True) for peer in places]
    return [*receives, *sends][::order], places


@pytest.mark.parametrize("batched", [False, True], ids=["gloo", "in batches"])
def test_all_ranks_exchange_data_in_any_order(threads: Threads, batched: bool) -> None:
    groups: dict[int, Any] = {}

    def exchange(rank: int) -> dict[int, list[float]]:
        gloo = threads.worlds[rank].group(f"together/{batched}", range(SIZE), 0)
        groups[rank] = LikeNCCL(gloo, rank) if batched else gloo
        make_communicator(groups[rank], CPU)
        got: dict[int, list[float]] = {}
        for order in (1, -1):
            transfers, places = everyone_to_everyone(rank, order if rank else 1)
            started = begin(groups[rank], transfers)
            started.wait(timedelta(seconds=10))
            started.wait()  # at once
            got = {peer: place.tolist() for peer, place in places.items()}
        return got

    for rank, got in enumerate(threads.every(exchange)):
        assert got == {peer: [float(peer)] * 3 for peer in range(SIZE) if peer != rank}
        if batched:
            assert groups[rank].communicators == [WHOLE]
            assert [len(batch) for batch in groups[rank].batches] == [2 * (SIZE - 1)] * 2


def test_a_failing_batch_of_transfers_ends(threads: Threads) -> None:
    """An unfinished NCCL batch would include operations of other groups."""

    def fail(rank: int) -> None:
        group = LikeNCCL(threads.worlds[rank].group("fails", range(SIZE), 0), rank)
        make_communicator(group, CPU)
        with pytest.raises(RuntimeError, match="no such rank"):
            begin(group, [Transfer(torch.zeros(1), 99, sends=True)])
        transfers, _ = everyone_to_everyone(rank, 1)
        begin(group, transfers).wait()

    threads.every(fail)


def test_a_missing_rank_ends_the_wait_and_the_group(threads: Threads) -> None:
    def wait(rank: int) -> Any:
        library = LikeNCCL(threads.worlds[rank].group("late", range(SIZE), 0), rank)
        group = AbortableGroup(library, "late", range(SIZE), 20.0, threads.worlds[rank].lost_ranks)
        make_communicator(group, CPU)
        begin(group, everyone_to_everyone(rank, 1)[0]).wait()
        if rank == 0:
            transfers = [Transfer(torch.zeros(1), 1, sends=False)]
            with pytest.raises(GroupLost, match=r"no answer for 0\.2 s"):
                begin(group, transfers).wait(timedelta(seconds=0.2))
            with pytest.raises(GroupLost, match="the group late was aborted"):
                begin(group, transfers)
        return group  # the groups end together: gloo would wait for the others

    assert len(threads.every(wait)) == SIZE
