"""Tampering with the queues at the control port is named, and counts as a crash that is requeued."""

from __future__ import annotations

import pytest

from hpcrl.controller.main import _explain
from hpcrl.launch.job import CRASHES
from hpcrl.messaging.dispatcher import Controller, RankFailed, RankLost
from hpcrl.messaging.mailbox_server import Arrival, SenderEnded
from hpcrl.messaging.messages import Done, DropBatch, Lost
from hpcrl.messaging.world import CONTROLLER_QUEUE, rank_queue
from hpcrl.system.exit_codes import ExitCode
from hpcrl.workers.rank_loop import Reported
from tests.dist.conftest import Threads
from tests.workers.conftest import Stage

pytestmark = pytest.mark.usefixtures("console")


def make_controller(threads: Threads, needed: bool = True) -> Controller:
    """needed: whether the run ends with the loss of any rank."""
    survivable = lambda *_: not needed  # noqa: E731
    return Controller(threads.worlds[0], lambda _: (), command_s=20.0, start_s=20.0, survivable=survivable)


@pytest.mark.parametrize(("rank", "attack"), [(1, "lost"), (2, "reordered")])
def test_a_rank_reports_that_its_commands_were_tampered_with(
    threads: Threads, stage: Stage, rank: int, attack: str
) -> None:
    worker, queue = stage.worker(rank, {}), rank_queue(rank)
    for batch in (1, 2):
        threads.worlds[0].sender.send(queue, DropBatch(batch))
    entries = threads.worlds[rank].mailbox_server.queue(queue)
    first, second = entries.get(timeout=20), entries.get(timeout=20)
    for raw in (second,) if attack == "lost" else (second, first):
        entries.put(raw)
    with pytest.raises(Reported):
        worker.execute_one(5.0)
    with pytest.raises(RankFailed) as caught:
        make_controller(threads).events()
    code, message = _explain(caught.value, built=True)
    assert code == ExitCode.STORE_LOST and code in CRASHES
    assert f"rank {rank} " in message and f"queue {queue}: message 2 of sender 0 came where 1 was expected" in message


@pytest.mark.parametrize("needed", [True, False])
def test_the_controller_drops_a_rank_whose_events_were_reordered(
    threads: Threads, capsys: pytest.CaptureFixture[str], needed: bool
) -> None:
    rank = 2 if needed else 1
    for seq in (1, 2):
        threads.worlds[rank].sender.send(CONTROLLER_QUEUE, Done(seq))
    entries = threads.worlds[0].mailbox_server.queue(CONTROLLER_QUEUE)
    arrived: list[Arrival | SenderEnded] = []
    while len(arrived) < 2:  # a test before may have left entries of another rank
        arrived += [entry for entry in [entries.get(timeout=20)] if entry.sender == rank]
    for entry in reversed(arrived):
        entries.put(entry)
    controller = make_controller(threads, needed)
    controller.built = True
    if not needed:
        ((lost, event),) = controller.events()
        assert lost == rank and isinstance(event, Lost) and "messages were lost" in event.cause
        assert "the run continues without it" in capsys.readouterr().out
        return
    with pytest.raises(RankLost) as caught:
        controller.events()
    code, message = _explain(caught.value, built=True)
    assert code == ExitCode.RANK_KILLED and code in CRASHES
    assert f"rank {rank} " in message and "queue controller: message " in message
