"""The node agent starts this node's ranks, watches them, reports losses to the controller and ends remaining ranks.

Unlike torch.distributed.elastic, the agent does not end the whole node when one rank fails, since a run must survive
the loss of a reward or env rank. The agent imports torch, which takes seconds, only to report a loss.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.messaging.bootstrap import ENDPOINT
from hpcrl.messaging.processes import state
from hpcrl.messaging.trace import DESCRIPTOR, LEAVING, read_trace
from hpcrl.node.devices import own_devices
from hpcrl.node.forks import AdoptedProcess, RankStart, fork_ranks
from hpcrl.node.host_memory import OutOfMemoryKills
from hpcrl.node.stack_requests import StackAnswers, prepare_requests
from hpcrl.run_folder import AGENT, OUTCOME, VERDICT
from hpcrl.system.clock import AwakeClock
from hpcrl.system.log import HEADER, UNSHOWN, message_of
from hpcrl.system.signals import die_with, held_back
from hpcrl.system.stacks import new_page

if TYPE_CHECKING:
    from hpcrl.messaging.queues import Sender

logger = logging.getLogger(__name__)

POLL_S = 0.05
CHECK_EVERY_S = 1.0
LISTENS_S = 3.0  # a controller with a heartbeat since then accepts messages
STUCK = 4  # the controller may spend this multiple of silent_s on one operation
KILL_S = 10.0  # a process blocked in the kernel (by a dead file system) may survive SIGKILL
SIGN_EVERY_S = 10.0  # maximum interval between two updates of the file that the batch script checks
SIGNS = 8  # at least this many updates in silent_s
LOG_LINES, LINE_CHARS, LOG_BYTES = 3, 200, 4096  # how much of the end of a log is shown

RankProcess = subprocess.Popen[bytes] | AdoptedProcess


@dataclass
class Verdict:
    """How the node's ranks ended.

    Args:
        controller_code: The controller's exit code; None on a node without rank 0.
        lost: Cause for each rank that failed.
        silent: Cause for each rank that the agent killed.
        signal_number: The first signal received, or 0.
    """

    controller_code: int | None
    lost: dict[int, str] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    signal_number: int = 0


class Agent:
    """One per node.

    Args:
        argv: Returns a rank's command, whose output goes to logs/rank_NNNN.log.
        gpus: CUDA_VISIBLE_DEVICES of each rank.
        signals: The stop signals that this process has received (see signals.noted).
        grace_s: Time for the other ranks to end after the controller.
        silent_s: A rank without a heartbeat for this long is killed.
        stopped_s: The same limit for a rank that was stopped (SIGSTOP).
        start_s: The same limit for a rank that has not sent its first heartbeat.
        impatient: Whether a repeated signal ends all ranks at once.
        parent: Command of a process that forks the ranks (hpcrl.node.forks); empty: each rank runs its own command.
        report_hang: Called with the cause before the controller is killed because it hangs; takes a few seconds.
    """

    def __init__(
        self,
        argv: Callable[[int], Sequence[str]],
        ranks: Sequence[int],
        *,
        environ: Mapping[str, str],
        gpus: Mapping[int, str],
        signals: Sequence[int],
        world_folder: Path,
        logs: Path,
        grace_s: float,
        silent_s: float,
        stopped_s: float,
        start_s: float,
        impatient: bool = True,
        parent: Sequence[str] = (),
        report_hang: Callable[[str], None] = lambda cause: None,
    ):
        self._parent = parent
        self._argv, self._ranks, self._environ, self._gpus = argv, ranks, environ, gpus
        self._folder, self._logs, self._grace_s = world_folder, logs, grace_s
        self._silent_s, self._stopped_s, self._start_s, self._impatient = silent_s, stopped_s, start_s, impatient
        self._processes: dict[int, RankProcess] = {}
        self._log_starts: dict[int, int] = {}  # bytes of earlier starts
        self._signals = signals
        self._sender: Sender | None = None
        self._earlier_outcome: int | None = None
        self._clock = AwakeClock(min(silent_s, stopped_s, start_s))  # polled by _watch
        self._pages = {rank: new_page() for rank in ranks}
        self._stacks = StackAnswers(world_folder, logs, self._pages, self._processes)
        self._report_hang = report_hang
        self._beats: dict[int, tuple[float, float]] = {}  # rank -> its last heartbeat, and when this was first seen
        self._runs: dict[int, float] = {}  # rank -> when it was last seen not stopped
        self._kills = OutOfMemoryKills.now()
        self._got_on = (0.0, 0.0)  # as in _beats, for the controller's current operation

    def run(self) -> Verdict:
        """Start the ranks and wait until all have ended; after the controller's end, the other ranks get grace_s.

        Called on the main thread: Linux kills the ranks when the thread that started them ends.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        self._forget_earlier_start()
        self._earlier_outcome = self._outcome()
        verdict = Verdict(None)
        try:
            self._start_all()
            processes = ", ".join(f"{rank} (pid {process.pid})" for rank, process in self._processes.items())
            logger.info("started rank %s", processes, extra=UNSHOWN)
            self._stacks.start()  # the process has one thread while it starts ranks
            self._watch(verdict)
        finally:
            self._end_all(verdict)
        verdict.signal_number = self._signals[0] if self._signals else 0
        return verdict

    def _forget_earlier_start(self) -> None:
        """Remove files of an earlier start of this attempt in the same folder."""
        if 0 in self._ranks:
            for name in (ENDPOINT, VERDICT):
                (self._folder / name).unlink(missing_ok=True)
            prepare_requests(self._folder)

    def _outcome(self) -> int | None:
        """Identity of the record that rank 0's agent writes at the end of the run; None without one."""
        try:
            return (self._folder / OUTCOME).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _start_all(self) -> None:
        for rank in self._ranks:
            log = self._logs / f"rank_{rank:04d}.log"
            self._log_starts[rank] = log.stat().st_size if log.exists() else 0
        starts = [self._about(rank) for rank in self._ranks]
        if self._parent and len(starts) > 1:
            end = self._clock.now() + self._start_s
            report_progress = lambda: not self._signals and self._clock.now() < end  # noqa: E731
            self._processes |= fork_ranks(self._parent, self._environ, starts, report_progress)
        for start in starts if not self._processes else ():
            self._processes[start.rank] = self._start(start)

    def _about(self, rank: int) -> RankStart:
        page = self._pages[rank]
        environ = own_devices(self._gpus[rank]) | {"HPCRL_RANK": str(rank), DESCRIPTOR: str(page)}
        # Rank 0 writes to the user; all other output goes to the logs.
        return RankStart(rank, environ, str(self._logs / f"rank_{rank:04d}.log"), rank != 0, [page])

    def _start(self, start: RankStart) -> subprocess.Popen[bytes]:
        with held_back() if start.quiet else contextlib.nullcontext(), open(start.log, "ab") as log:
            return subprocess.Popen(
                list(self._argv(start.rank)),
                env={**self._environ, **start.environ},
                pass_fds=start.inherited,
                stdin=subprocess.DEVNULL,
                stdout=log if start.quiet else None,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - no thread runs yet that could hold a lock
            )

    def _watch(self, verdict: Verdict) -> None:
        alive = dict(self._processes)
        unreported: dict[int, str] = {}
        started = next_check = next_sign = self._clock.now()
        deadline = forwarded = None
        while alive or unreported:
            now = self._clock.now()
            for rank, process in list(alive.items()):
                code = _reap(process)
                if code is None:
                    continue
                del alive[rank]
                if code != 0 or self._ran_away(rank):
                    verdict.lost[rank] = self._cause(rank, code, verdict.silent.get(rank))
                if rank == 0:
                    verdict.controller_code = code
                elif rank in verdict.lost:
                    unreported[rank] = verdict.lost[rank]
                    logger.warning("rank %d is lost: %s", rank, verdict.lost[rank], extra=UNSHOWN)
            # SIGINT or SIGTERM a second time ends everything in a local run. A batch system sends SIGUSR1, then SIGTERM
            # two or three times, while a save may still succeed.
            asked = [number for number in self._signals if number != signal.SIGUSR1]
            if self._impatient and len(asked) > len(set(asked)):
                return
            if self._signals and forwarded is None and 0 in alive:
                forwarded = self._signals[0]
                alive[0].send_signal(forwarded)
                again = "; again: stop now, without the current step" if self._impatient else ""
                name = signal.Signals(forwarded).name
                logger.warning("%s: stopping after the current step%s", name, again)
            # Ranks on other nodes end at Shutdown or once the store is gone; this node's ranks get grace_s to end.
            if verdict.controller_code is not None:
                unreported.clear()
                deadline = deadline or now + self._grace_s
            elif not alive:  # the last loss is not reported yet, and the controller may still be starting
                deadline = deadline or now + self._start_s
            if deadline is not None and now > deadline:
                return
            if now >= next_sign and 0 in self._ranks:
                next_sign = now + min(SIGN_EVERY_S, self._silent_s / SIGNS)
                (self._folder / AGENT).touch()
            if now > next_check:
                next_check = now + CHECK_EVERY_S
                # Later the store exists, and ranks notice its loss.
                comes_up = now - started < self._start_s or not alive
                if comes_up and 0 not in self._ranks and self._outcome() != self._earlier_outcome:
                    unreported.clear()
                    deadline = min(deadline or math.inf, now + self._grace_s)
                self._check_beats(alive, now, started, verdict.silent)
                for rank, cause in list(unreported.items()):
                    if self._report(rank, cause, rank in verdict.silent):
                        del unreported[rank]
            time.sleep(POLL_S)

    def _check_beats(
        self, alive: Mapping[int, RankProcess], now: float, started: float, silent: dict[int, str]
    ) -> None:
        """Kill a rank that does not start, was stopped, or sends no heartbeat because it is stuck in native code.

        A heartbeat's age counts from the time at which this process first reads it, so after a pause of the job the
        ranks have the full time again.
        """
        for rank, process in alive.items():
            if rank in silent:  # killed, and not ended yet
                continue
            if state(process.pid) != "stopped":
                self._runs[rank] = now
            elif now - self._runs.setdefault(rank, now) > self._stopped_s:
                silent[rank] = f"was stopped (SIGSTOP) for {now - self._runs[rank]:.0f} s"
                self._kill(rank, silent[rank])
                continue
            activity = read_trace(self._pages[rank])
            if activity is None:
                if now - started > self._start_s:
                    silent[rank] = f"did not start within {self._start_s:g} s"
                    self._kill(rank, silent[rank])
                continue
            if self._beats.get(rank, (0.0, 0.0))[0] != activity.beat:
                self._beats[rank] = activity.beat, now
            if rank == 0 and self._got_on[0] != activity.since:
                self._got_on = activity.since, now
            if now - self._beats[rank][1] > self._silent_s:
                silent[rank] = f"sent no heartbeat for {now - self._beats[rank][1]:.0f} s"
            elif rank == 0 and now - self._got_on[1] > STUCK * self._silent_s:  # only the agent watches the controller
                silent[rank] = f"made no progress for {now - self._got_on[1]:.0f} s"
            if rank in silent:
                self._kill(rank, silent[rank])

    def _kill(self, rank: int, cause: str) -> None:
        """Kill a rank that hangs; its stacks are kept. The controller's end is the run's, so it is reported before."""
        self._stacks.keep(rank)
        if rank == 0:
            self._report_hang(cause)
        _kill_group(self._processes[rank].pid)

    def _ran_away(self, rank: int) -> bool:
        """Whether a rank that ended with code 0 had not finished: user code may have ended its process."""
        activity = read_trace(self._pages[rank])
        return activity is not None and activity.name != LEAVING

    def _cause(self, rank: int, code: int, silent: str | None) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if code == -signal.SIGKILL and not silent and (why := OutOfMemoryKills.now().explain(self._kills)):
            how += why
            self._kills = OutOfMemoryKills(self._kills.in_cgroup + 1, self._kills.on_machine + 1)  # this one
        activity = read_trace(self._pages[rank])
        doing = f" in {activity.name}" + f" #{activity.seq}" * bool(activity.seq) if activity is not None else ""
        if activity is not None and activity.thread_activity and not silent:
            name = activity.thread_activity
            doing += f", while a thread ran {name}, whose code may have ended it ({name}.runs_in=process confines it)"
        where = f"process {self._processes[rank].pid} on {socket.gethostname()}"
        said = f"{where} {silent}{doing} and was killed" if silent else f"{where} {how}{doing}"
        return said + _last_words(self._logs / f"rank_{rank:04d}.log", self._log_starts[rank])

    def _report(self, rank: int, cause: str, silent: bool) -> bool:
        """Report to the controller; False if it is not reachable yet, True also if it has ended and needs no report."""
        endpoint = self._folder / ENDPOINT
        # Connecting to a hung controller would block this loop, which must detect that hang.
        if not endpoint.exists() or (0 in self._beats and self._clock.now() - self._beats[0][1] > LISTENS_S):
            return False
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # the user sees the agent's stderr
        from hpcrl.messaging.mailbox_server import Dialer
        from hpcrl.messaging.messages import Lost
        from hpcrl.messaging.queues import ControlError, Sender, connect

        where = json.loads(endpoint.read_text())
        try:
            if self._sender is None:
                key = Path(where["key_file"]).read_bytes()
                number = -1 - int(self._environ.get("HPCRL_NODE", "0"))
                store = connect(where["host"], where["port"], self._grace_s)
                self._sender = Sender(Dialer(store, key, number, self._grace_s, self._grace_s), key, number)
            self._sender.send("controller", Lost(rank, cause, silent))
        except (ControlError, FileNotFoundError) as error:
            if 0 not in self._ranks:
                logger.error("rank %d: %s; not reported: %s", rank, cause, error)
        return True

    def _end_all(self, verdict: Verdict) -> None:
        """End all remaining processes: SIGKILL to the process group of each rank."""
        alive = {rank: process for rank, process in self._processes.items() if process.returncode is None}
        for process in alive.values():
            _kill_group(process.pid)
        for rank, process in alive.items():
            try:
                process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                logger.error("rank %d (pid %d) survives SIGKILL", rank, process.pid)
            if rank == 0 and process.returncode is not None:
                verdict.controller_code = process.returncode
                verdict.lost[0] = self._cause(0, process.returncode, verdict.silent.get(0))


def _last_words(log: Path, start: int) -> str:
    """The last lines of a log after `start`, in one line, without INFO messages; empty if there are none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    told = [
        message_of(line) for line in text.splitlines() if not ((at := HEADER.match(line)) and at["level"] == "INFO")
    ]
    lines = ["".join(filter(str.isprintable, line)).strip() for line in told]
    shown = [line[:LINE_CHARS] for line in lines if line][-LOG_LINES:]
    return f"; its log ends: {' | '.join(shown)}" if shown else ""


def _reap(process: RankProcess) -> int | None:
    """Exit code of a rank that has ended, after killing all processes it started; None while it runs."""
    # Until the rank is reaped, its pid cannot be reused, so the process group still belongs to it.
    if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    _kill_group(process.pid)
    return process.wait()


def _kill_group(pid: int) -> None:
    """End a rank and everything in its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
