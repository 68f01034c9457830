"""The node agent: starts this node's ranks, watches them, tells the controller of losses, ends what is left, by pid.

It starts plain processes instead of torch.distributed.elastic's: elastic ends the whole node when one rank fails, where
a lost reward or env rank must be survived, and importing torch would cost the agent seconds at every start. torch is
imported only when there is a loss to report.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.dist.trace import read_trace

POLL_S = 0.05
PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass
class Verdict:
    """How the node's ranks ended. lost: rank -> what its process did, for ranks that ended badly."""

    controller_code: int | None
    lost: dict[int, str] = field(default_factory=dict)
    signal_number: int = 0


class Agent:
    """One per node. `argv(rank)` is the command of a rank; logs/rank_NNNN.log gets what it prints."""

    def __init__(
        self,
        argv: Callable[[int], Sequence[str]],
        ranks: Sequence[int],
        *,
        environ: Mapping[str, str],
        world_folder: Path,
        logs: Path,
        grace_s: float,
        silent_s: float,
    ):
        self._argv, self._ranks, self._environ = argv, ranks, environ
        self._folder, self._logs, self._grace_s, self._silent_s = world_folder, logs, grace_s, silent_s
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._signals = 0
        self._signal_number = 0
        self._sender = None

    def run(self) -> Verdict:
        """Start the ranks and stay until all have ended. The controller's end ends the others within grace_s."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        before = {number: signal.signal(number, self._on_signal) for number in FORWARDED}
        verdict = Verdict(None)
        try:
            for rank in self._ranks:
                self._start(rank)
            self._watch(verdict)
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)
        verdict.signal_number = self._signal_number
        return verdict

    def _start(self, rank: int) -> None:
        log = open(self._logs / f"rank_{rank:04d}.log", "ab")  # noqa: SIM115
        # Rank 0 talks to the user; what it and the others say besides goes to the logs.
        self._processes[rank] = subprocess.Popen(
            list(self._argv(rank)),
            env={**self._environ, "HPCRL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        log.close()

    def _watch(self, verdict: Verdict) -> None:
        ended: set[int] = set()
        deadline = None
        next_check = time.monotonic() + 1.0
        while len(ended) < len(self._processes):
            for rank, process in self._processes.items():
                if rank in ended or process.poll() is None:
                    continue
                ended.add(rank)
                if rank == 0:
                    verdict.controller_code = process.returncode
                if process.returncode != 0:
                    verdict.lost[rank] = self._cause(rank, process.returncode)
                    if rank != 0:
                        self._report(rank, verdict.lost[rank])
                _kill_group(process.pid)  # what the rank had started
            # Ranks on other nodes end by Leave or because the store is gone; this node's get grace_s for it.
            if deadline is None and (0 in ended or self._signals > 1):
                deadline = time.monotonic() + self._grace_s
            if deadline is not None and time.monotonic() > deadline:
                return
            if time.monotonic() > next_check:
                next_check = time.monotonic() + 1.0
                self._check_beats(set(self._processes) - ended)
            time.sleep(POLL_S)

    def _check_beats(self, alive: set[int]) -> None:
        """A process that has not beaten for silent_s is stopped or stuck in native code: end it, which reports it."""
        for rank in alive:
            activity = read_trace(self._folder / f"trace_{rank}")
            if activity is None:
                continue
            stuck = rank == 0 and activity.age_s > 2 * self._silent_s  # nobody else watches the controller
            if activity.beat_age_s > self._silent_s or stuck:
                _kill_group(self._processes[rank].pid)

    def _cause(self, rank: int, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        activity = read_trace(self._folder / f"trace_{rank}")
        doing = f" in {activity.name} #{activity.seq}" if activity is not None and activity.name else ""
        silent = ""
        if activity is not None and activity.beat_age_s > self._silent_s:
            silent = f" after {activity.beat_age_s:.0f} s without a heartbeat"
        return f"process on {socket.gethostname()} {how}{doing}{silent}"

    def _report(self, rank: int, cause: str) -> None:
        """Tell the controller. Where it is gone too, there is nobody to tell: its own end decides."""
        endpoint, controller = self._folder / "endpoint.json", self._processes.get(0)
        if not endpoint.exists() or (controller is not None and controller.poll() is not None):
            return
        from hpcrl.dist.control import ControlError, Sender, connect
        from hpcrl.dist.messages import Lost

        where = json.loads(endpoint.read_text())
        try:
            if self._sender is None:
                key = Path(where["key_file"]).read_bytes()
                number = -1 - int(self._environ.get("HPCRL_NODE", "0"))
                self._sender = Sender(connect(where["host"], where["port"], self._grace_s), key, number)
            self._sender.send("controller", Lost(rank, cause))
        except ControlError as error:
            print(f"hpcrl agent: rank {rank}: {cause}; not reported: {error}", file=sys.stderr, flush=True)

    def _on_signal(self, number: int, frame: object) -> None:
        """The first signal asks the controller to stop at a step boundary, the second ends everything."""
        self._signals += 1
        self._signal_number = self._signal_number or number
        process = self._processes.get(0)
        if self._signals == 1 and process is not None and process.poll() is None:
            process.send_signal(number)

    def _end_all(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + min(2.0, self._grace_s)
        while any(p.poll() is None for p in self._processes.values()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in self._processes.values():
            _kill_group(process.pid)
            process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    """End a rank and everything in its session."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
