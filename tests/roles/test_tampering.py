"""What somebody at the control port can do to the queues is named, and counts as a crash that is requeued."""

from __future__ import annotations

import pytest

from hpcrl.control.controller import Controller, RankFailed
from hpcrl.control.messages import Done, DropBatch
from hpcrl.control.queues import ControlError
from hpcrl.control.world import CONTROLLER_QUEUE, rank_queue
from hpcrl.exitcodes import ExitCode
from hpcrl.launch.job import CRASHES
from hpcrl.rank0 import _explain
from hpcrl.roles.worker import Reported
from tests.dist.conftest import Threads
from tests.roles.conftest import Stage


def make_controller(threads: Threads) -> Controller:
    return Controller(threads.worlds[0], lambda _: (), command_s=20.0, start_s=20.0, survivable=lambda *_: False)


@pytest.mark.parametrize(("rank", "attack"), [(1, "lost"), (2, "reordered")])
def test_a_rank_says_that_its_commands_were_tampered_with(
    threads: Threads, stage: Stage, rank: int, attack: str
) -> None:
    worker, queue = stage.worker(rank, {}), rank_queue(rank)
    for batch in (1, 2):
        threads.worlds[0].sender.send(queue, DropBatch(batch))
    entries = threads.worlds[rank].intake.queue(queue)
    first, second = entries.get(timeout=5), entries.get(timeout=5)
    for raw in (second,) if attack == "lost" else (second, first):
        entries.put(raw)
    with pytest.raises(Reported):
        worker.execute_one(5.0)
    with pytest.raises(RankFailed) as caught:
        make_controller(threads).events()
    code, message = _explain(caught.value, built=True)
    assert code == ExitCode.STORE_LOST and code in CRASHES
    assert f"rank {rank} " in message and f"queue {queue}: message 2 of sender 0 came where 1 was due" in message


def test_the_controller_says_that_its_events_were_reordered(threads: Threads, stage: Stage) -> None:
    for seq in (1, 2):
        threads.worlds[2].sender.send(CONTROLLER_QUEUE, Done(seq))
    entries = threads.worlds[0].intake.queue(CONTROLLER_QUEUE)
    first, second = entries.get(timeout=5), entries.get(timeout=5)
    for raw in (second, first):
        entries.put(raw)
    with pytest.raises(ControlError) as caught:
        make_controller(threads).events()
    code, message = _explain(caught.value, built=True)
    assert code == ExitCode.STORE_LOST and "queue controller: message " in message and "of sender 2" in message
