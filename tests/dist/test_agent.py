"""The node agent with tiny programs as ranks: when it kills ranks, what it reports, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.node.agent import Agent

AGENT = """
import dataclasses, json, os, sys
from pathlib import Path
from hpcrl.node.agent import Agent
from hpcrl.system import log
from hpcrl.system.signals import noted
log.start("agent", console="stderr")
folder, programs, options = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
parent = [sys.executable, "-c", sys.argv[4], sys.argv[2]] if sys.argv[4] else []
argv = lambda rank: [sys.executable, "-c", programs[rank]] if programs[rank] else [str(folder / "missing")]
with noted() as signals:
    agent = Agent(argv, range(len(programs)), environ={**os.environ, "FOLDER": str(folder)},
        gpus={rank: str(rank) for rank in range(len(programs))}, signals=signals, world_folder=folder / "world",
        logs=folder / "logs", parent=parent,
        **{"grace_s": 1.0, "silent_s": 60.0, "stopped_s": 60.0, "start_s": 60.0, **options})
    print(json.dumps(dataclasses.asdict(agent.run())))
"""

# Forks the ranks and then runs their programs.
FORK = """
import json, os, sys
from pathlib import Path
from hpcrl.node.forks import Parent
parent = Parent()
Path(os.environ["FOLDER"], "parent").write_text(str(os.getpid()))
parent.fork()
exec(json.loads(sys.argv[1])[int(os.environ["HPCRL_RANK"])])
"""

# The start of the ranks' programs: up() reports the process id to the test, wait() waits for the test.
HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, rank = Path(os.environ["FOLDER"]), os.environ["HPCRL_RANK"]
def up(name=rank, pid=os.getpid()):
    (folder / f"pid_{name}.tmp").write_text(str(pid))
    (folder / f"pid_{name}.tmp").rename(folder / f"pid_{name}")
def child(name):
    up(name, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid)
def wait(name):
    while not (folder / name).exists(): time.sleep(.02)
"""
STAY = HEAD + "up(); time.sleep(100)"
CONTROLLER = HEAD + "up(); wait('end')"
STUBBORN = HEAD + "signal.signal(signal.SIGTERM, signal.SIG_IGN); child('child'); up(); time.sleep(100)"
POLITE = HEAD + (
    "signal.signal(signal.SIGTERM, lambda *_: (folder / 'asked').touch()); up(); wait('asked'); wait('end')\n"
    "sys.exit(5)"
)
BEATING = HEAD + "from hpcrl.messaging.trace import Trace; Trace.of_process().enter('DecodeChunk', 3); up()\n"


def until(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Node:
    """An agent in its own process, and what its ranks have reported."""

    def __init__(self, folder: Path, parent: str = ""):
        self.folder, self.parent = folder, parent
        self.process: subprocess.Popen[str] | None = None

    def start(self, *programs: str, **options: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(self.folder), json.dumps(programs), json.dumps(options), self.parent],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pid(self, name: int | str) -> int:
        path = self.folder / f"pid_{name}"
        until(path.exists, f"{name} is up")
        return int(path.read_text())

    def release(self, name: str = "end") -> None:
        (self.folder / name).touch()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def verdict(self, seconds: float = 40) -> dict[str, Any]:
        """The agent's verdict; no process that it started may be left."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, err
        self.assert_empty()
        return json.loads(out.splitlines()[-1])

    def assert_empty(self) -> None:
        pids = {path.name: int(path.read_text()) for path in self.folder.glob("pid_*") if path.suffix != ".tmp"}
        until(lambda: not any(map(is_alive, pids.values())), f"all of {pids} have ended")

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank_{rank:04d}.log").read_text()


@pytest.fixture(params=["", FORK], ids=["programs", "forks"])
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    """With ranks started as programs, or forked from one process."""
    node = Node(tmp_path, request.param)
    yield node
    if node.process is not None and node.process.poll() is None:
        node.process.kill()
        node.process.communicate()


@pytest.mark.slow
def test_exit_codes_and_logs(node: Node) -> None:
    controller = HEAD + "print('to the user'); print('to the log', file=sys.stderr); wait('end')"
    node.start(controller, HEAD + "print('one'); up()", HEAD + "print('two'); up(); sys.exit(3)")
    pids = node.pid(1), node.pid(2)
    until(lambda: not any(map(is_alive, pids)), "both have ended")
    node.release()
    assert node.process is not None
    out, _ = node.process.communicate(timeout=40)
    first, last = out.splitlines()
    verdict = json.loads(last)
    assert first == "to the user"
    assert (verdict["controller_code"], verdict["signal_number"], list(verdict["lost"])) == (0, 0, ["2"])
    assert verdict["lost"]["2"].endswith("exited with code 3; its log ends: two")
    assert (node.log(0), node.log(1), node.log(2)) == ("to the log\n", "one\n", "two\n")
    assert (node.folder / "parent").exists() is bool(node.parent)
    (node.folder / "end").unlink()
    node.start(controller, HEAD + "print('again', flush=True); up('again')")
    node.pid("again")
    node.release()
    assert node.verdict()["lost"] == {}
    assert node.log(1) == "one\nagain\n"


@pytest.mark.slow
def test_a_lost_rank_is_named_with_the_last_lines_of_its_log(node: Node) -> None:
    """Without control characters, and without lines of an earlier start."""
    (node.folder / "logs").mkdir()
    (node.folder / "logs" / "rank_0001.log").write_text("earlier\n")
    noisy = "print(*range(9), '', '\\x1b[1m' + 'x' * 999, sep='\\n'); up(); sys.exit(3)"
    node.start(CONTROLLER, HEAD + "up(); sys.exit(3)", HEAD + noisy)
    pids = node.pid(1), node.pid(2)
    until(lambda: not any(map(is_alive, pids)), "both have ended")
    node.release()
    lost = node.verdict()["lost"]
    assert lost["1"].endswith("exited with code 3")
    assert lost["2"].endswith("exited with code 3; its log ends: 7 | 8 | [1m" + "x" * 197)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_its_children_are_killed(node: Node) -> None:
    node.start(CONTROLLER, BEATING + "child('child'); time.sleep(100)", STAY)
    grandchild, rank = node.pid("child"), node.pid(1)
    assert is_alive(grandchild)
    os.kill(rank, signal.SIGKILL)
    until(lambda: not is_alive(grandchild), "the rank's child has ended")
    assert is_alive(node.pid(0))
    assert is_alive(node.pid(2))  # the controller decides about the other ranks
    node.release()
    verdict = node.verdict()
    assert verdict["controller_code"] == 0
    assert f"process {rank} on " in verdict["lost"]["1"]
    assert verdict["lost"]["1"].endswith("was killed by SIGKILL in DecodeChunk #3")


@pytest.mark.slow
def test_the_end_of_the_controller_ends_a_rank_that_ignores_sigterm(node: Node) -> None:
    node.start(HEAD + "wait('end'); sys.exit(7)", STUBBORN, grace_s=0.5)
    node.pid("child"), node.pid(1)
    node.release()
    verdict = node.verdict()
    assert verdict["controller_code"] == 7
    assert verdict["lost"]["0"].endswith("exited with code 7")


def test_a_killed_agent_takes_its_ranks_down(node: Node) -> None:
    node.start(CONTROLLER, STAY, HEAD + "signal.signal(signal.SIGTERM, signal.SIG_IGN); up(); time.sleep(100)")
    assert all(is_alive(node.pid(rank)) for rank in range(3))
    node.signal(signal.SIGKILL)
    node.assert_empty()


@pytest.mark.slow
def test_the_first_signal_reaches_only_the_controller(node: Node) -> None:
    node.start(POLITE, STAY)
    node.pid(0), node.pid(1)
    node.signal(signal.SIGTERM)
    until((node.folder / "asked").exists, "the controller was asked to stop")
    node.signal(signal.SIGUSR1)  # another signal does not end it
    time.sleep(0.3)
    assert is_alive(node.pid(0))
    assert is_alive(node.pid(1))
    node.release()
    verdict = node.verdict()
    assert (verdict["controller_code"], verdict["signal_number"]) == (5, signal.SIGTERM)


def test_the_second_signal_kills_everything(node: Node) -> None:
    node.start(POLITE, STUBBORN, STAY)
    for name in (0, 1, 2, "child"):
        node.pid(name)
    node.signal(signal.SIGTERM)
    until((node.folder / "asked").exists, "the controller was asked to stop")
    node.signal(signal.SIGTERM)
    verdict = node.verdict()
    assert verdict["controller_code"] == -signal.SIGKILL  # its end does not count as success
    assert verdict["signal_number"] == signal.SIGTERM
    assert verdict["lost"]["0"].endswith("was killed by SIGKILL")


@pytest.mark.slow
def test_the_first_signal_is_acknowledged_and_later_ones_change_nothing(
    node: Node,
) -> None:
    """A scheduler, or a person, may send SIGUSR1 many times; also while the agent ends."""
    node.start(POLITE.replace("SIGTERM", "SIGUSR1"), STAY)
    node.pid(0), node.pid(1)
    for _ in range(20):
        node.signal(signal.SIGUSR1)
        time.sleep(0.02)
    assert is_alive(node.pid(0)) and is_alive(node.pid(1))
    node.release()
    for _ in range(30):
        node.signal(signal.SIGUSR1)
        time.sleep(0.02)
    out, err = node.process.communicate(timeout=40)
    verdict = json.loads(out.splitlines()[-1])
    assert node.process.returncode == 0, err
    assert (verdict["controller_code"], verdict["signal_number"]) == (5, signal.SIGUSR1)
    assert err.count("hpcrl: SIGUSR1: stopping after the current step") == 1
    node.assert_empty()


@pytest.mark.slow
def test_an_immediate_signal_is_not_lost(node: Node) -> None:
    node.start(HEAD + "wait('never')", STAY)
    until((node.folder / "logs" / "rank_0000.log").exists, "the agent starts its ranks")
    node.signal(signal.SIGINT)
    verdict = node.verdict()
    assert verdict["signal_number"] == signal.SIGINT
    assert verdict["controller_code"] != 0


@pytest.mark.slow
def test_a_rank_without_heartbeats_is_killed(node: Node) -> None:
    node.start(CONTROLLER, BEATING + "time.sleep(100)", BEATING + "time.sleep(100)", silent_s=6.0)
    os.kill(node.pid(1), signal.SIGSTOP)
    until(lambda: not is_alive(node.pid(1)), "the stopped rank has ended")
    assert is_alive(node.pid(2))  # it beats
    node.release()
    verdict = node.verdict()
    assert list(verdict["silent"]) == ["1"]
    assert "sent no heartbeat for" in verdict["lost"]["1"]
    assert verdict["lost"]["1"].endswith("in DecodeChunk #3 and was killed")


@pytest.mark.slow
def test_a_stopped_rank_is_killed_long_before_a_rank_that_computes(node: Node) -> None:
    """The second computes in native code, which blocks all threads of the interpreter, for longer."""
    busy = "import ctypes; ctypes.PyDLL(None).sleep(100)"
    node.start(CONTROLLER, BEATING + "time.sleep(100)", BEATING + busy, stopped_s=2.0)
    os.kill(node.pid(1), signal.SIGSTOP)
    until(lambda: not is_alive(node.pid(1)), "the stopped rank has ended")
    time.sleep(1.0)
    assert is_alive(node.pid(2))
    node.release()
    verdict = node.verdict()
    assert list(verdict["silent"]) == ["1"]
    assert "was stopped (SIGSTOP) for" in verdict["lost"]["1"]


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["silent_s", "stopped_s"])
def test_a_suspended_job_continues_when_it_wakes(node: Node, limit: str) -> None:
    """All processes are stopped longer than a rank may be; the agent wakes before its ranks."""
    node.start(BEATING + "wait('end')", BEATING + "wait('end')", **{limit: 3.0})
    assert node.process is not None
    pids = [node.process.pid, node.pid(0), node.pid(1)]
    time.sleep(1.5)  # their beats were seen
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    time.sleep(1.5)
    node.release()
    assert node.verdict()["silent"] == {}


@pytest.mark.slow
def test_a_job_suspended_during_its_start_continues_when_it_wakes(node: Node) -> None:
    node.start(CONTROLLER, start_s=4.0)
    os.kill(node.pid(0), signal.SIGSTOP)
    node.signal(signal.SIGSTOP)
    time.sleep(4.3)
    node.signal(signal.SIGCONT)
    time.sleep(0.3)
    assert is_alive(node.pid(0))
    os.kill(node.pid(0), signal.SIGCONT)
    node.release()
    assert node.verdict()["silent"] == {}


@pytest.mark.slow
def test_a_rank_that_never_starts_is_killed(node: Node) -> None:
    node.start(CONTROLLER, BEATING + "time.sleep(100)", STAY, start_s=5.0, grace_s=60.0)
    pids = node.pid(0), node.pid(2)
    until(lambda: not any(map(is_alive, pids)), "the ranks without a trace have ended")
    assert is_alive(node.pid(1))
    os.kill(node.pid(1), signal.SIGKILL)
    assert list(node.verdict()["silent"]) == ["0", "2"]


def test_a_rank_that_dies_slowly_is_reported_and_killed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    killed: list[int] = []
    agent = Agent(
        lambda rank: [],
        [0],
        environ={},
        gpus={},
        signals=[],
        world_folder=tmp_path / "world",
        logs=tmp_path / "logs",
        grace_s=1.0,
        silent_s=60.0,
        stopped_s=60.0,
        start_s=1.0,
        report_hang=reported.append,
    )
    monkeypatch.setattr("hpcrl.node.agent._kill_group", killed.append)
    with subprocess.Popen(["sleep", "100"]) as rank0:
        agent._processes[0] = rank0
        silent: dict[int, str] = {}
        for now in (10.0, 11.0, 12.0):
            agent._check_beats({0: rank0}, now, 0.0, silent)
        rank0.kill()
    assert reported == ["did not start within 1 s"] == [*silent.values()] and killed == [rank0.pid]


@pytest.mark.parametrize("node", [""], indirect=True, ids=["programs"])
def test_a_rank_that_cannot_be_started_leaves_no_other_ranks(node: Node) -> None:
    node.start(CONTROLLER, "")
    assert node.process is not None
    _, err = node.process.communicate(timeout=40)
    assert node.process.returncode == 1
    assert "missing" in err
    node.assert_empty()


@pytest.mark.slow
def test_files_of_an_earlier_start_in_the_folder_are_ignored(node: Node) -> None:
    world = node.folder / "world"
    node.start(CONTROLLER, BEATING)
    node.pid(1)
    for name in ("endpoint.json", "verdict.json"):
        (world / name).write_text("{}")
    node.release()
    node.verdict()
    (node.folder / "end").unlink()
    (node.folder / "pid_1").unlink()
    node.start(CONTROLLER, STAY)
    node.pid(1)
    assert not (world / "endpoint.json").exists()
    assert not (world / "verdict.json").exists()
    node.release()
    node.verdict()


@pytest.mark.slow
def test_a_lost_rank_is_reported_even_to_a_controller_that_starts_later(node: Node) -> None:
    from hpcrl.messaging import queues
    from hpcrl.messaging.bootstrap import make_key_file
    from hpcrl.messaging.mailbox_server import MailboxServer
    from hpcrl.messaging.messages import Event, Lost
    from hpcrl.messaging.world import CONTROLLER_QUEUE

    node.start(CONTROLLER, HEAD + "up(); sys.exit(3)")
    node.pid(1)
    time.sleep(1.2)
    store, world = queues.serve("127.0.0.1", 20), node.folder / "world"
    key = make_key_file(world, "name")
    endpoint = {"host": "127.0.0.1", "port": store.port, "key_file": str(key), "world": "name"}
    (world / "endpoint.tmp").write_text(json.dumps(endpoint))
    (world / "endpoint.tmp").rename(world / "endpoint.json")
    mailbox_server = MailboxServer("127.0.0.1", key.read_bytes())
    inbox = queues.Inbox(mailbox_server.queue(CONTROLLER_QUEUE), CONTROLLER_QUEUE, key.read_bytes(), Event)
    mailbox_server.publish(store, 0)
    message = inbox.get(40)
    assert message is not None
    sender, _, lost = message
    assert sender == -1  # node 0's agent
    assert isinstance(lost, Lost)
    assert (lost.rank, lost.silent) == (1, False)
    assert lost.cause.endswith("exited with code 3")
    mailbox_server.close()
    node.release()
    node.verdict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "told"),
    [
        (
            FORK.replace("parent.fork()", "import threading; threading.Timer(9, print).start(); parent.fork()"),
            "2 threads",
        ),
        (FORK.replace("parent.fork()", "raise ImportError('no engine')"), "ImportError: no engine"),
        (FORK.replace("parent.fork()", "os.kill(os.getpid(), 9)"), ""),
    ],
    indirect=["node"],
    ids=["threads", "raises", "killed"],
)
def test_ranks_that_cannot_be_forked_are_started_as_programs(node: Node, told: str) -> None:
    node.start(CONTROLLER, STAY)
    assert node.pid(0) != node.pid(1)
    assert told in node.log(0) and "environment variable" not in node.log(0)
    assert Path(f"/proc/{node.pid(1)}/cmdline").read_bytes().count(b"Parent()") == 0
    node.release()
    assert node.verdict()["lost"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("node", [FORK.replace("parent.fork()", "import time; time.sleep(100)")], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_during_imports_reaches_the_controller_at_once(node: Node, number: int) -> None:
    """The controller's program gets the first signal at once."""
    node.start(HEAD + "wait('never')", STAY)
    path = node.folder / "parent"
    until(lambda: path.exists() and bool(path.read_text()), "the parent imports")
    node.signal(number)
    until(lambda: not is_alive(int(path.read_text())), "the parent has ended")
    if number == signal.SIGTERM:
        verdict = node.verdict()
        assert (verdict["signal_number"], verdict["controller_code"]) == (number, -number)
    assert not list(node.folder.glob("pid_0"))


@pytest.mark.parametrize("node", [FORK.replace("parent.fork", "print('once'); parent.fork")], indirect=True)
def test_forked_ranks_have_separate_sessions_environments_and_descriptors(node: Node) -> None:
    tell = """
import json
numbers = [int(number) for number in os.listdir("/proc/self/fd")]
told = {"session": os.getsid(0) == os.getpid(), "gpu": os.environ["CUDA_VISIBLE_DEVICES"],
        "fds": len(numbers), "stdin": os.readlink("/proc/self/fd/0"), "forks": "HPCRL_FORKS" in os.environ,
        "held": signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())}
(folder / f"told_{rank}").write_text(json.dumps(told))
print(rank)
"""
    node.start(HEAD + tell, HEAD + tell)
    assert node.process is not None
    out, _ = node.process.communicate(timeout=40)
    assert out.splitlines()[:-1] == ["0"]
    assert (node.log(0), node.log(1)) == ("once\n", "1\n")
    told = [json.loads((node.folder / f"told_{rank}").read_text()) for rank in range(2)]
    # Beside the three standard ones: the page of the trace, and the folder that is listed.
    same = {"session": True, "fds": 5, "stdin": "/dev/null", "forks": False}
    # A signal asks rank 0 to stop; the others block signals until they can handle them.
    assert told == [{**same, "gpu": "0", "held": False}, {**same, "gpu": "1", "held": True}]
