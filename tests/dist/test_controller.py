"""The controller's side of the control plane over a real store, at the sizes and rates of a large run."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from hpcrl.messaging.background import Background
from hpcrl.messaging.dispatcher import MAX_TAKEN, Controller, RankFailed, RankLost, RankSilent
from hpcrl.messaging.mailbox_server import Push, SenderEnded
from hpcrl.messaging.messages import (
    Advantages,
    DecodeChunk,
    Done,
    DropSamples,
    Failed,
    Joined,
    Lost,
    Scored,
    ScoredSample,
)
from hpcrl.messaging.queues import Sender
from hpcrl.messaging.world import CONTROLLER_QUEUE
from hpcrl.system.clock import AwakeClock
from hpcrl.timeline.recorder import Recorder
from tests.timeline.test_recorder import Kept


@pytest.fixture
def controller(threads: Any) -> Controller:
    return make_controller(threads)


def make_controller(
    threads: Any, command_s: float = 20.0, background: Background | None = None, start_s: float = 20.0
) -> Controller:
    return Controller(
        threads.worlds[0],
        lambda rank: (),
        command_s=command_s,
        start_s=start_s,
        survivable=lambda *_: False,
        background=background,
    )


def say(threads: Any, *events: Any) -> None:
    """Rank 1 sends events to the controller, whose queue holds them at the return: this thread reads them."""
    queue = threads.worlds[0].mailbox_server.queue(CONTROLLER_QUEUE)
    expected = queue.qsize() + len(events)
    for event in events:
        threads.worlds[1].sender.send(CONTROLLER_QUEUE, event)
    while queue.qsize() < expected:
        time.sleep(0.001)


def test_events_are_delivered_while_more_keep_coming(threads: Any, controller: Controller) -> None:
    sent = [Scored([ScoredSample(sample, 1.0, 1.0)]) for sample in range(MAX_TAKEN + 100)]
    say(threads, *sent)
    first = controller.events()
    assert MAX_TAKEN <= len(first) < len(sent)
    assert [event for _, event in first + controller.events()] == sent


def test_the_cost_of_an_answer_does_not_grow_with_outstanding_commands(
    threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AwakeClock, "now", lambda clock: 7.0)  # deadlines are checked once per check_s: here never

    def work(outstanding: int) -> int:
        """Bytecode instructions for 300 answers while `outstanding` other commands wait for answers."""
        controller, instructions = make_controller(threads), 0
        started = [answer for batch in range(300) for answer in controller.start({1: Advantages(batch)})]
        for _ in range(outstanding):
            controller.send(2, Advantages(0))
        say(threads, *(Done(seq) for _, seq in started))
        controller._check_deadlines()

        def count(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal instructions
            frame.f_trace_opcodes = True
            instructions += event == "opcode"
            return count

        before = sys.gettrace()
        sys.settrace(count)
        answers = controller.finish(started)
        sys.settrace(before)
        assert len(answers) == 1  # all are of rank 1
        return instructions

    assert work(4000) < 1.5 * work(0)


def test_a_rank_that_does_not_answer_is_named_after_its_deadline(threads: Any) -> None:
    controller = make_controller(threads, command_s=0.5)
    say(threads, Done(0))  # of no command
    start = time.monotonic()
    with pytest.raises(RankSilent, match=r"no answer within 0.5 s: rank 1 \(no role\) in command Advantages #\d+"):
        controller.call({1: Advantages(7)})
    assert 0.5 <= time.monotonic() - start < 20


def test_an_answer_that_nobody_awaits_has_a_deadline_but_is_not_kept(threads: Any) -> None:
    """Such as answers to decode chunks from a replica's ranks after the first."""
    controller = make_controller(threads, command_s=0.5)
    say(threads, Done(controller.send(1, DecodeChunk(4, []))))
    while controller._outstanding:
        assert controller._take(0.5)
    assert not controller._answers and not controller._events
    controller.send(1, DecodeChunk(4, []))
    with pytest.raises(RankSilent, match=r"rank 1 \(no role\) in command DecodeChunk #\d+"):
        while True:
            controller._take(0.1)


@pytest.mark.slow
def test_a_deadline_ignores_a_pause_of_the_job(threads: Any) -> None:
    """The clock is not read for two deadlines, as in a suspended job; then the answer comes."""
    controller = make_controller(threads, command_s=1.5)
    started = controller.start({1: Advantages(7)})
    assert not controller._take(0.0)
    time.sleep(3.0)
    assert not controller._take(0.0)
    say(threads, Done(started[0][1]))
    assert controller.finish(started) == {1: Done(started[0][1])}


@pytest.mark.slow
def test_the_start_deadline_ignores_a_pause_of_the_job(threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = make_controller(threads, start_s=1.0)
    take = controller._take

    def pause(timeout_s: float) -> bool:
        monkeypatch.setattr(controller, "_take", take)
        time.sleep(1.2)
        taken = take(0.0)
        for world in threads.worlds:
            world.sender.send(CONTROLLER_QUEUE, Joined("host", 1))
        return taken

    monkeypatch.setattr(controller, "_take", pause)
    controller.await_world()
    with pytest.raises(RankSilent, match=r"did not join the world within 0.3 s: rank 0"):
        make_controller(threads, start_s=0.3).await_world()


@pytest.mark.slow
def test_a_command_can_have_a_longer_timeout(threads: Any) -> None:
    controller = make_controller(threads, command_s=0.4)
    start = time.monotonic()
    with pytest.raises(RankSilent, match=r"no answer within 1.6 s: rank 1 \(no role\) in command Advantages #\d+"):
        controller.call({1: Advantages(7)}, more_s=1.2)
    assert 1.6 <= time.monotonic() - start < 20
    activity = threads.worlds[0].trace.read()
    assert activity is not None and activity.name == "call Advantages"
    assert activity.since - start > 0.6, "its agent need not take the controller for stuck"


def test_background_work_between_events_does_not_block(threads: Any) -> None:
    asked: list[tuple[int, int]] = []
    known: list[bool] = []
    background = Background()
    controller = make_controller(threads, background=background)

    def look() -> None:
        if not asked:
            asked.extend(controller.start({1: Advantages(7)}))
        known.append(controller.answered(asked))

    background.check(look)
    scored = Scored([ScoredSample(1, 1.0, 1.0)])
    say(threads, scored)
    assert controller.events() == [(1, scored)] and known == [False]
    say(threads, Done(asked[0][1]), scored)
    assert controller.events() == [(1, scored)], "an answer is not an event"
    assert controller.answered(asked) and controller.finish(asked) == {1: Done(asked[0][1])}


def test_events_before_an_answer_go_to_the_listener(threads: Any) -> None:
    """Without a listener they are kept until they are read."""
    heard: list[tuple[int, Any]] = []
    scored = Scored([ScoredSample(1, 1.0, 1.0)])
    for listens in (False, True):
        background = Background()
        controller = make_controller(threads, background=background)
        if listens:
            background.on_events(heard.extend)
        started = controller.start({1: Advantages(7)})
        say(threads, scored, Done(started[0][1]))
        assert controller.finish(started) == {1: Done(started[0][1])}
        assert heard == ([(1, scored)] if listens else [])
        if not listens:
            assert controller.events() == [(1, scored)]


def test_local_roles_work_while_their_answer_is_awaited(threads: Any) -> None:
    def run_local() -> bool:
        if runs:
            return False
        runs.append(1)
        say(threads, Done(started[0][1]))
        return True

    runs: list[int] = []
    controller = make_controller(threads, background=Background(run_local))
    started = controller.start({1: Advantages(7)})
    assert controller.finish(started) == {1: Done(started[0][1])} and runs == [1]


def test_the_timeline_has_what_the_controller_waited_for_also_in_vain(threads: Any) -> None:
    """A command to two ranks, of which one has answered before the wait begins, and the other never answers."""
    kept = Kept()
    controller = make_controller(threads, command_s=0.5)
    controller.timeline = recorder = Recorder([("controller",), ("trainer",), ("trainer",)], "node1", kept)
    recorder.begin(3)
    started = controller.start(dict.fromkeys((1, 2), Advantages(7)))
    number = started[0][1]
    now = time.monotonic()
    say(threads, Joined("node1", 1), Done(number, spans=[(number - 1, now, 0.0), (number, now, 0.25)]))
    while (1, number) not in controller._answers:
        controller._take(0.5)
    with pytest.raises(RankSilent, match=r"rank 2 \(no role\) in command Advantages"):
        controller.finish(started)
    recorder.close(0.0)
    (step,) = (recorded.converted() for recorded in kept.steps)
    assert [wait.what for wait in step.waits] == ["Advantages"] and step.waits[0].duration > 200_000
    assert [(row.rank, row.name, row.duration) for row in step.commands] == [(1, "?", 0), (1, "Advantages", 250_000)]
    assert not step.header.complete and step.header.ranks[1].host == "node1"


def test_every_rank_can_find_out_which_ranks_are_lost(threads: Any) -> None:
    """Ranks that wait for a lost rank in a transfer must not wait for the library's timeout."""
    controller = Controller(
        threads.worlds[0], lambda rank: (), command_s=20.0, start_s=20.0, survivable=lambda *_: True
    )
    controller.built = True
    for rank in (2, 1):
        controller.declare_lost(rank, "it hangs", 3.0)
    assert threads.worlds[1].lost_ranks() == {1, 2}


@pytest.mark.parametrize("needed", [True, False])
def test_an_unreachable_rank_counts_as_lost_with_the_reason(
    threads: Any, monkeypatch: pytest.MonkeyPatch, needed: bool
) -> None:
    def dial(queue: str) -> Push:
        raise OSError("no route to host")

    monkeypatch.setattr("hpcrl.messaging.dispatcher.CAUSE_S", 0.2)
    world = replace(threads.worlds[0], sender=Sender(dial, b"k" * 32, 0))
    controller = Controller(world, lambda rank: (), command_s=4.0, start_s=20.0, survivable=lambda *_: not needed)
    controller.built = True
    controller.send(2, DropSamples([5]))  # a command that nobody answers
    why = "DropSamples to rank/2 was not sent, its reader is gone: no route to host"
    if needed:
        with pytest.raises(RankSilent, match=f"rank 2 .*is lost: {why}"):
            controller.events()
        return
    assert controller.events() == [(2, Lost(2, why, silent=True))] and controller.lost == {2}
    assert controller.send(2, DropSamples([5])) == -1


@pytest.mark.parametrize("closed", [True, False])
def test_a_peer_whose_process_ended_is_named_as_the_cause(
    threads: Any, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """Under torchrun no agent reports it; before, the rank that had waited for it was named."""
    monkeypatch.setattr("hpcrl.messaging.dispatcher.CAUSE_S", 0.2)
    controller = make_controller(threads)
    if closed:
        threads.worlds[0].mailbox_server.queue(CONTROLLER_QUEUE).put(
            SenderEnded(2, "closed", "its connection has ended")
        )
    say(threads, Failed(3, "TrainStep", "gloo: Connection closed by peer", kind="peer"))
    error, text = (RankLost, "rank 2 .* is lost: its conn") if closed else (RankFailed, "rank 1 .* failed in .*: gloo")
    with pytest.raises(error, match=text):
        controller.events()
