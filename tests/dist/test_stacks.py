"""Stacks of processes that compute, hang in native code, are stopped or have ended, and requests for them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcrl.messaging.trace import UnansweredCommand
from hpcrl.node.hang_report import BUDGET_S, as_ranges, describe, does, who_waits, write_hang_report
from hpcrl.node.stack_requests import (
    ANSWERS,
    KILLED,
    REQUEST,
    LocalRank,
    RankStack,
    StackAnswers,
    answer_path,
    ask_ranks,
    prepare_requests,
    read_answers,
    request_stacks,
)
from hpcrl.run_folder import hang_path, log_folder, world_folder
from hpcrl.system import stacks
from hpcrl.system.stacks import ALL_THREADS, MAIN_THREAD, ProcessStack, new_page, read_stacks

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
import os, sys, threading, time
from hpcrl.messaging.trace import Trace
from hpcrl.system.stacks import register_stacks
page = int(sys.argv[1])
def a_worker(): time.sleep(100)
def native_with_the_lock(): max(iter(int, 1))
def waits_for_a_child():
    if not os.fork(): in_the_child()
    os.wait()
def in_the_child(): time.sleep(100)
def begins_native(): native_with_the_lock()
def computes():
    while True: sum(range(100))
def has_strange_names():
    name = "named\\nCurrent thread 0x1 (most recent call first):\\n"
    exec(computes.__code__.replace(co_name=name, co_filename="/\\udcff.py"))
register_stacks(page)
Trace(page).enter("UpdateWeights", 41)
for _ in range(int(sys.argv[3])): threading.Thread(target=a_worker, daemon=True).start()
print("up", flush=True)
globals()[sys.argv[2]]()
"""


class Hanging:
    """A process that executes a function of PROGRAM."""

    def __init__(self, function: str, num_threads: int = 0):
        self.page, self.function = new_page(), function
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self.page), function, str(num_threads)],
            pass_fds=[self.page],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"
        time.sleep(0.05)

    def await_silence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until it is clear that native code holds the lock."""
        monkeypatch.setattr(stacks, "SILENT_S", 1.0)
        while not stacks._is_silent(self.process.pid, self.page):
            time.sleep(0.05)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        os.close(self.page)


@pytest.fixture
def hanging(request: pytest.FixtureRequest) -> Iterator[Hanging]:
    one = Hanging(*request.param)
    yield one
    one.end()


@pytest.mark.parametrize(
    ("hanging", "function"),
    [(("computes", 2), "computes"), (("native_with_the_lock", 2), "native_with_the_lock")],
    indirect=["hanging"],
    ids=["in Python", "in native code that holds the interpreter lock"],
)
def test_the_main_thread_comes_first_and_a_second_request_shows_only_new_stacks(
    hanging: Hanging, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if function == "native_with_the_lock":
        hanging.await_silence(monkeypatch)
    for _ in range(3):
        found = read_stacks(hanging.process.pid, hanging.page, 20)
        assert found.missing == "" and found.kernel == "runs"
        threads = found.stacks.split("\n\n")
        assert threads[0].startswith("main thread (most recent call first):\n") and f"in {function}" in threads[0]
        assert sum("in a_worker" in thread for thread in threads[1:]) == 2
        assert sum("in _beat_forever" in thread for thread in threads[1:]) == 1
        assert len(threads) == 4 and "_bootstrap" not in found.stacks
    assert hanging.process.poll() is None


@pytest.mark.parametrize(
    ("hanging", "sent", "shown"),
    [
        (("computes", 2), [], 4),
        (("native_with_the_lock", 2), [ALL_THREADS], 4),
        (("begins_native", 2), [MAIN_THREAD], 2),
        (("waits_for_a_child", 2), [MAIN_THREAD], 2),
    ],
    indirect=["hanging"],
    ids=["computes", "holds the lock", "may hold the lock", "forked"],
)
def test_a_signal_reads_other_threads_only_if_none_executes_python(
    hanging: Hanging, sent: list[int], shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faulthandler would read frames that are freed meanwhile, and crash the process."""
    pid, page, within_s, kill, signals = hanging.process.pid, hanging.page, 40.0, os.kill, list[int]()
    if shown == 4 and sent:
        hanging.await_silence(monkeypatch)
    elif sent == [MAIN_THREAD]:
        within_s = 2.0
        if hanging.function == "waits_for_a_child":
            [pid] = stacks.children_of(pid)
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number) or kill(pid, number))
    found = read_stacks(pid, page, within_s).stacks.split("\n\n")
    assert signals == sent and len(found) == shown and found[0].startswith("main thread")
    assert (found[-1] == "further threads are not shown") == (sent == [MAIN_THREAD])


@pytest.mark.parametrize("hanging", [("computes",)], indirect=True)
def test_a_process_that_was_stopped_longer_than_it_may_be_silent_gets_no_signal(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that a suspended job, or a lack of CPUs, has kept from running."""
    os.kill(hanging.process.pid, signal.SIGSTOP)
    hanging.await_silence(monkeypatch)
    os.kill(hanging.process.pid, signal.SIGCONT)
    kill, signals = os.kill, list[int]()
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number) or kill(pid, number))
    while (found := read_stacks(hanging.process.pid, hanging.page, 20)).missing == "the process is stopped by a signal":
        time.sleep(0.01)
    assert "in computes" in found.stacks and signals == []


@pytest.mark.parametrize("hanging", [("computes",)], indirect=True)
def test_a_late_answer_is_not_taken_for_the_answer_to_the_next_request(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    mark = stacks._mark
    monkeypatch.setattr(stacks, "_mark", lambda number: asked.append(number) or mark(number))
    for _ in range(2):
        read_stacks(hanging.process.pid, hanging.page, 20)
    assert asked[0] < asked[1]
    os.ftruncate(hanging.page, stacks.STACKS_AT)
    os.pwrite(hanging.page, f"{mark(7)}Current thread 0x1 (most recent call first):\n  late".encode(), stacks.STACKS_AT)
    monkeypatch.setattr(os, "ftruncate", lambda *_: None)  # as if the late answer came after it
    found = read_stacks(hanging.process.pid, hanging.page, 20).stacks
    assert found.count("main thread") == 1 and "in computes" in found and "late" not in found


def test_a_process_that_has_written_less_than_a_thread_gives_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A starved process may have come no further in its time."""
    for begun in ("", "Thr", "Thread 0x00007f0", "Current thread 0x00007f01 (most recent call first):"):
        monkeypatch.setattr(stacks, "_ask_thread", lambda *_: (None, True))
        monkeypatch.setattr(stacks, "_ask", lambda *_, begun=begun: (begun, False))
        monkeypatch.setattr(stacks, "_has", lambda *_: True)
        page = new_page()
        found = read_stacks(os.getpid(), page, 0.5)
        os.close(page)
        assert found.stacks == "" and found.missing.startswith("the process gave none within 0.5 s: it runs"), begun


@pytest.mark.parametrize("hanging", [("has_strange_names",)], indirect=True)
def test_names_of_user_code_are_escaped_and_do_not_end_the_thread_that_answers(hanging: Hanging) -> None:
    for _ in range(2):
        threads = read_stacks(hanging.process.pid, hanging.page, 20).stacks.split("\n\n")
        assert [thread.split()[0] for thread in threads] == ["main", "thread"], threads
        assert r'File "/\udcff.py"' in threads[0] and r"in named\nCurrent thread 0x1" in threads[0]


@pytest.mark.parametrize("hanging", [("computes", 150)], indirect=True)
def test_the_main_thread_is_shown_among_more_threads_than_faulthandler_writes(hanging: Hanging) -> None:
    threads = read_stacks(hanging.process.pid, hanging.page, 20).stacks.split("\n\n")
    assert threads[0].startswith("main thread") and "in computes" in threads[0]
    assert len(threads) == 102 and threads[-1] == "further threads are not shown"


@pytest.mark.parametrize("hanging", [("computes", 2)], indirect=True)
def test_readers_at_once_wait_for_each_other(hanging: Hanging) -> None:
    """Each empties the page before it asks. --local opens the page anew; an agent's threads share a descriptor."""

    def read(number: int) -> list[str]:
        page = os.open(f"/proc/{hanging.process.pid}/fd/{hanging.page}", os.O_RDWR) if number % 2 else hanging.page
        try:
            return [read_stacks(hanging.process.pid, page, 20).stacks for _ in range(3)]
        finally:
            if number % 2:
                os.close(page)

    with ThreadPoolExecutor(4) as pool:
        for found in itertools.chain(*pool.map(read, range(4))):
            assert len(found.split("\n\n")) == 4 and "in computes" in found.split("\n\n")[0], found


@pytest.mark.parametrize("hanging", [("computes",)], indirect=True)
def test_a_reader_that_does_not_end_is_not_awaited(hanging: Hanging) -> None:
    with stacks._alone(hanging.page, 1) as alone:
        assert alone
        found = read_stacks(hanging.process.pid, hanging.page, 0.1)
    assert (found.stacks, found.missing) == ("", "another reader has asked the process for more than 0.1 s")
    assert "in computes" in read_stacks(hanging.process.pid, hanging.page, 20).stacks


@pytest.mark.parametrize("hanging", [("computes",)], indirect=True)
def test_a_stopped_process_and_one_that_has_ended_give_a_reason_instead(hanging: Hanging) -> None:
    os.kill(hanging.process.pid, signal.SIGSTOP)
    while read_stacks(hanging.process.pid, hanging.page).missing != "the process is stopped by a signal":
        time.sleep(0.01)
    began = time.monotonic()
    assert read_stacks(hanging.process.pid, hanging.page, 60).stacks == ""
    assert time.monotonic() - began < 20, "does not wait for an answer"
    os.kill(hanging.process.pid, signal.SIGCONT)
    assert "in computes" in read_stacks(hanging.process.pid, hanging.page, 20).stacks
    hanging.process.kill()
    hanging.process.wait()
    assert read_stacks(hanging.process.pid, hanging.page).missing == "the process has ended"


@pytest.mark.parametrize("hanging", [("native_with_the_lock",)], indirect=True)
@pytest.mark.parametrize("reaped", [False, True])
def test_a_process_that_ends_while_it_is_asked_is_not_awaited(
    hanging: Hanging, reaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = os.kill

    def ends(pid: int, number: int) -> None:
        kill(pid, signal.SIGKILL)
        if reaped:
            os.waitpid(pid, 0)

    hanging.await_silence(monkeypatch)
    began = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", ends)
        found = read_stacks(hanging.process.pid, hanging.page, 60)
    assert (found.stacks, found.missing) == ("", "the process has ended")
    assert time.monotonic() - began < 40


def test_a_process_that_has_not_registered_gets_no_signal() -> None:
    """The signal would end it."""
    page = new_page()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as process:
        found = read_stacks(process.pid, page)
        assert found.stacks == "" and "not come as far" in found.missing
        time.sleep(0.1)
        assert process.poll() is None
        process.kill()
    os.close(page)
    assert signal.SIGRTMIN + 2 < ALL_THREADS < signal.SIGRTMAX - 10


@pytest.mark.parametrize("hanging", [("waits_for_a_child",)], indirect=True)
def test_stacks_of_child_processes_follow(hanging: Hanging) -> None:
    until = time.monotonic() + 20
    while "in in_the_child" not in (found := RankStack.of(3, hanging.process.pid, hanging.page)).stacks:
        assert time.monotonic() < until, found.stacks  # the child may still be on its way there
        time.sleep(0.1)
    own, _, child = found.stacks.partition("child process ")
    assert "in waits_for_a_child" in own.split("\n\n")[0] and "in in_the_child" not in own
    assert "in in_the_child" in child and child.split()[1].startswith("(python")
    assert (found.rank, found.doing, found.process) == (3, "UpdateWeights #41", hanging.process.pid)


@pytest.mark.parametrize("shares", [False, True], ids=["own pages", "a shared page"])
def test_many_child_processes_that_do_not_answer_take_no_longer_than_two(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [new_page()] * 16 if shares else [new_page() for _ in range(16)]
    given = list[float]()

    def gives_at_the_end(pid: int, descriptor: int, within_s: float) -> ProcessStack:
        given.append(within_s)
        time.sleep(within_s)
        return ProcessStack("main thread", "", "sleeps")

    monkeypatch.setattr(stacks, "children_of", lambda pid: list(range(16)))
    monkeypatch.setattr(stacks, "page_of", lambda child: Path(f"/proc/self/fd/{pages[child]}"))
    monkeypatch.setattr(stacks, "read_stacks", gives_at_the_end)
    told = stacks.read_child_stacks(os.getpid())
    assert len(told) == 16 and sum("main thread" in one for one in told) == len(given)
    assert sum(given) <= stacks.CHILDREN_S if shares else len(given) == 16
    for page in set(pages):
        os.close(page)


def test_ranks_of_a_host_are_asked_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take seconds, and the report of a hang has five."""
    together = threading.Barrier(8, timeout=20)

    def look(self: LocalRank, rank: int) -> RankStack:
        together.wait()
        return of(rank, "")

    monkeypatch.setattr(LocalRank, "look", look)
    found = ask_ranks({rank: LocalRank(rank, Path("/dev/null")) for rank in range(8)})
    assert [one.rank for one in found.values()] == list(found) == list(range(8))


class Attempt:
    """A run folder with the agent's answers for two ranks: the first computes, the second is stopped."""

    def __init__(self, folder: Path):
        self.run_dir, self.world = folder, world_folder(folder, 1)
        self.world.mkdir(parents=True)
        self.ranks = [Hanging("computes"), Hanging("computes")]
        os.kill(self.ranks[1].process.pid, signal.SIGSTOP)
        pages = {rank: one.page for rank, one in enumerate(self.ranks)}
        processes = {rank: one.process for rank, one in enumerate(self.ranks)}
        prepare_requests(self.world)
        self.answers = StackAnswers(self.world, log_folder(folder, 1), pages, processes)
        self.answers.start()

    def answered(self, folder: Path, *ranks: int, within_s: float = 20) -> dict[int, RankStack]:
        end = time.monotonic() + within_s
        while len(found := read_answers(folder, ranks)) < len(ranks) and time.monotonic() < end:
            time.sleep(0.02)
        return found


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    one = Attempt(tmp_path)
    yield one
    for rank in one.ranks:
        rank.end()


@pytest.mark.slow
def test_requests_are_answered_once_by_files(attempt: Attempt) -> None:
    folder = request_stacks(attempt.run_dir, 1)
    found = attempt.answered(folder, 0, 1)
    assert "in computes" in found[0].stacks and does(found[0]).startswith("is in computes (<string>, line ")
    assert found[1].missing == "the process is stopped by a signal" and found[1].doing == "UpdateWeights #41"
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0000.txt", "rank_0001.txt"]
    second = request_stacks(attempt.run_dir, 1, [1])
    assert list(attempt.answered(second, 1)) == [1]
    assert [path.name for path in second.iterdir()] == ["rank_0001.txt"]
    attempt.ranks[1].process.kill()
    attempt.ranks[1].process.wait()
    third = attempt.answered(request_stacks(attempt.run_dir, 1, [1]), 1)
    assert third[1].missing == "the process has ended with exit code -9"


def test_the_stack_of_a_killed_rank_is_kept(attempt: Attempt) -> None:
    attempt.answers.keep(0)
    attempt.ranks[0].process.kill()
    attempt.ranks[0].process.wait()
    assert "in computes" in attempt.answered(request_stacks(attempt.run_dir, 1), 0)[0].stacks
    kept = attempt.answered(log_folder(attempt.run_dir, 1) / ANSWERS / KILLED, 0)
    assert "in computes" in kept[0].stacks


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        "not JSON",
        '{"id": "../../../../tmp/elsewhere"}',
        '{"id": "20261130T064501-0123abcd", "ranks": "all"}',
        '{"id": "20261130T064501-0123abcd", "ranks": ' + "[" * 60000,
    ],
)
def test_damaged_and_hostile_requests_are_ignored(
    attempt: Attempt, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (attempt.world / REQUEST).write_text(content)
    while "is no request for stacks" not in caplog.text:
        time.sleep(0.02)
    assert not log_folder(attempt.run_dir, 1).exists()
    assert attempt.answered(request_stacks(attempt.run_dir, 1), 0), "the next request is answered"


@pytest.mark.slow
def test_requests_that_are_no_regular_file_do_not_block(attempt: Attempt) -> None:
    (attempt.world / REQUEST).unlink()
    os.mkfifo(attempt.world / REQUEST)
    time.sleep(1.2)
    (attempt.world / REQUEST).unlink()
    (attempt.world / REQUEST).symlink_to("/dev/zero")
    time.sleep(1.2)
    assert attempt.answered(request_stacks(attempt.run_dir, 1), 0)


def test_a_request_of_another_user_is_ignored(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = os.geteuid()
    folder = request_stacks(attempt.run_dir, 1)
    attempt.answered(folder, 0)
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(PermissionError, match=r"belongs to user .*, whose agents answer only to that user"):
        request_stacks(attempt.run_dir, 1)
    while f"is not a file of user {own + 1}, but of user {own}" not in caplog.text:
        time.sleep(0.02)


def test_answers_survive_writing_and_damaged_ones_are_none(tmp_path: Path) -> None:
    one = RankStack(
        3, "node02", 17, "UpdateWeights #41", 61.25, 0.5, "reward.math", "sleeps", "", "main thread:\n x\n\ny"
    )
    path = answer_path(tmp_path, 3)
    path.write_text(one.text())
    read = RankStack.read(path)
    assert read is not None and (read.doing, read.stacks, read.seconds) == (one.doing, one.stacks, 61.2)
    for damaged in ("", "rank: 3\n", one.text().replace("61.2", "long"), one.text()[:40]):
        path.write_text(damaged)
        assert RankStack.read(path) is None
    assert RankStack.read(answer_path(tmp_path, 4)) is None


COLLECTIVE = """main thread (most recent call first):
  File "/site/torch/distributed/distributed_c10d.py", line 9 in all_reduce
  File "/hpcrl/workers/trainer.py", line 3 in step"""
WORKS = """main thread (most recent call first):
  File "/home/me/reward.py", line 7 in score"""
NEXT = """main thread (most recent call first):
  File "/usr/lib/threading.py", line 331 in wait
  File "/site/hpcrl/workers/rank_loop.py", line 95 in serve"""


def of(rank: int, doing: str, stacks: str = "", missing: str = "", heartbeat: float = 0.5) -> RankStack:
    return RankStack(rank, f"node{rank:02d}", 100 + rank, doing, 61.0, heartbeat, "", "sleeps", missing, stacks)


def said(unanswered: list[tuple[int, str, int]], *found: RankStack) -> list[str]:
    late = [UnansweredCommand(*one, 61.0) for one in unanswered]
    return list(who_waits(late, {one.rank: one for one in found}, lambda rank: f"rank {rank}"))


def test_who_waits_for_whom() -> None:
    update = [(rank, "UpdateWeights", 40 + rank) for rank in range(4)]
    waiting = [of(rank, f"UpdateWeights #{40 + rank}", COLLECTIVE) for rank in range(4)]
    began = "has been in UpdateWeights #43 for 61 s:"
    assert said(update, *waiting)[-1] == "ranks 0-3 wait for each other in UpdateWeights: compare their stacks"

    works = said(update, *waiting[:3], of(3, "UpdateWeights #43", WORKS))
    assert works[0] == "rank 0 has been in UpdateWeights #40 for 61 s: it waits for other ranks"
    assert works[3:] == [
        f"rank 3 {began} it is in score (/home/me/reward.py, line 7)",
        "ranks 0-2 wait for rank 3 in the same command",
    ]
    behind = said(update, *waiting[:3], of(3, "TrainStep #42", WORKS))
    assert behind[3].startswith(
        f"rank 3 {began} it has not begun it, but been in TrainStep #42 for 61 s, and is in score"
    )
    stopped = said(update, *waiting[:3], of(3, "UpdateWeights #43", missing="the process is stopped by a signal"))
    assert stopped[3:] == [f"rank 3 {began} the process is stopped by a signal", behind[4]]
    silent = said(update, *waiting[:3], of(3, "UpdateWeights #43", COLLECTIVE, heartbeat=30.0))
    assert silent[3].startswith(f"rank 3 {began} no heartbeat for 30 s")
    assert said(update, *waiting[:3])[3:] == [f"rank 3 {began} nothing is known about its process", behind[4]]
    idle = said([(1, "DecodeChunk", 7)], of(0, "call X"), of(1, "DecodeChunk #7", WORKS), of(2, "idle #9", NEXT))
    assert idle[1:] == ["rank 2 has answered all commands"]
    assert said([]) == []


def test_what_a_rank_does_is_said_in_one_line() -> None:
    assert does(of(2, "idle #9", NEXT)) == "waits for its next command"
    assert does(of(2, "TrainStep #9", COLLECTIVE)) == "waits for other ranks, in all_reduce"
    assert does(of(2, "idle #9", WORKS)) == "is in score (/home/me/reward.py, line 7), between commands"
    shown = describe(of(2, "X #1", WORKS.replace("score", "sc\x1b[31more")), ["reward"])
    assert shown.startswith(
        "rank 2 (reward) on node02, process 102: in X #1 for 61 s, last heartbeat 0 s ago\n  is in sc?"
    )
    assert "\x1b" not in shown and shown.endswith("in sc?[31more\n")
    assert "  no stack: it is gone\n" in describe(of(2, "X #1", missing="it is gone"), [])
    assert as_ranges([5, 0, 1, 2]) == "ranks 0-2, 5" and as_ranges([3]) == "rank 3"


@pytest.mark.slow
def test_the_report_names_ranks_without_an_answer_and_takes_no_longer_than_its_budget(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2's agent does not run."""
    late = [UnansweredCommand(1, "UpdateWeights", 41, 61.0)]
    began = time.monotonic()
    told = write_hang_report(
        attempt.run_dir,
        1,
        "no answer within 60 s: rank 1",
        [["controller"], ["generator"], ["env"]],
        unanswered=late,
        prompts=[f"prompt {n}" for n in range(50)],
        responses={2: 7},
    )
    assert time.monotonic() - began < 2 * BUDGET_S, "the budget, and a moment of a busy machine"
    path = hang_path(attempt.run_dir, 1)
    assert told == f"stacks of all ranks: {path}"
    text = path.read_text()
    for part in (
        "no answer within 60 s: rank 1\n",
        "rank 1 (generator, ",
        ") has been in UpdateWeights #41 for 61 s: the process is stopped by a signal\n",
        "7 responses wait for a reward or an environment of rank 2 (env)\n",
        "prompt 39\nand 10 more\n",
        "no answer about rank 2: ",
        "in computes\n",
        "  no stack: the process is stopped by a signal\n",
    ):
        assert part in text, (part, text)

    def blocks(*_: object) -> None:
        time.sleep(100)

    monkeypatch.setattr("hpcrl.node.hang_report.request_stacks", blocks)  # as a file system that does not answer
    monkeypatch.setattr("hpcrl.node.hang_report.BUDGET_S", 0.5)
    assert write_hang_report(attempt.run_dir, 1, "", [[]]).endswith("could not be written within 0.5 s")
    assert json.loads((attempt.world / REQUEST).read_text())["ranks"] is None
