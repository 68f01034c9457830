"""Requests for the stacks of a run's ranks, through files of the run folder, so that no control plane is needed.

    world/attempt_NNNN/stacks.json                    the newest request, which the attempt's agents read once a second
    logs/attempt_NNNN/stacks/REQUEST/rank_NNNN.txt    the answer about a rank, from its node's agent

Agents accept a request only from a regular file that belongs to their user. Without agents, ask_ranks() asks the ranks
of this host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from hpcrl.messaging.processes import RANK_NAME, born
from hpcrl.messaging.trace import read_trace
from hpcrl.run_folder import log_folder, world_folder
from hpcrl.system.files import write_durably
from hpcrl.system.stacks import page_of, read_child_stacks, read_stacks

logger = logging.getLogger(__name__)

REQUEST, ANSWERS = "stacks.json", "stacks"
KILLED = "killed"
"""Instead of a request: the stacks that ranks had when their agent killed them."""
POLL_S = 1.0
LOCK_S = 4.0  # an answer to a request takes half of this
MAX_BYTES, MAX_PARALLEL = 1 << 16, 32
ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}")


class StackRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request; without `ranks`, for all ranks."""

    id: str
    ranks: list[int] | None = None

    def __post_init__(self) -> None:
        if not ID.fullmatch(self.id):  # names a folder
            raise ValueError(f"id is {self.id[:40]!r}")


@dataclass(frozen=True)
class RankStack:
    """What a rank does, and its stacks.

    Args:
        doing: Its activity, with the activity's number; empty before its first record.
        seconds: How long it has done so.
        heartbeat: Seconds since the last heartbeat.
        thread: The configuration section whose code another thread executes, or empty.
        kernel: State, system call and kernel function of the process.
        missing: Why there are no stacks, or why they may be incomplete; or empty.
        stacks: As in hpcrl.system.stacks, then those of processes that it has started.
    """

    rank: int
    host: str
    process: int
    doing: str = ""
    seconds: float = 0.0
    heartbeat: float = 0.0
    thread: str = ""
    kernel: str = ""
    missing: str = ""
    stacks: str = ""

    @classmethod
    def of(cls, rank: int, pid: int, page: int) -> RankStack:
        """The answer of a process of this host, whose page is the file descriptor `page`."""
        activity = read_trace(page)
        stacks, missing, kernel = read_stacks(pid, page)
        stacks = "\n\n".join([stacks, *read_child_stacks(pid)]).strip("\n")
        found = cls(rank, socket.gethostname(), pid, kernel=kernel, missing=missing, stacks=stacks)
        if activity is None:
            return found
        now, doing = time.monotonic(), f"{activity.name} #{activity.seq}" if activity.seq else activity.name
        since, beat = now - activity.since, now - activity.beat
        return replace(found, doing=doing, seconds=since, heartbeat=beat, thread=activity.thread_activity)

    @property
    def has_own(self) -> bool:
        """Whether there is a stack of the rank, not only of processes that it has started."""
        return self.stacks.startswith("main thread")

    def text(self) -> str:
        """The content of its file."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name != "stacks")
        head = "".join(f"{name}: {f'{v:.1f}' if isinstance(v, float) else v}\n" for name, v in values)
        return f"{head}\n{self.stacks}\n"

    @classmethod
    def read(cls, path: Path) -> RankStack | None:
        """The answer in a file; None if there is none, or it is damaged."""
        try:
            head, _, stacks = path.read_text(errors="replace").partition("\n\n")
            told = dict(line.split(": ", 1) for line in head.splitlines())
            return cls(
                int(told["rank"]),
                told["host"],
                int(told["process"]),
                seconds=float(told["seconds"]),
                heartbeat=float(told["heartbeat"]),
                **{name: told[name] for name in ("doing", "thread", "kernel", "missing")},
                stacks=stacks.strip("\n"),
            )
        except (OSError, ValueError, KeyError):
            return None


class AgentRank(Protocol):
    """A rank's process, as its agent knows it."""

    pid: int
    returncode: int | None


class StackAnswers:
    """An agent's answers to requests, from a thread, so a file system that does not answer delays no agent.

    Args:
        world: The attempt's world folder.
        logs: Its log folder.
        pages: Rank -> file descriptor of its page.
        processes: Rank -> its process, which the agent may still be starting.
    """

    def __init__(self, world: Path, logs: Path, pages: Mapping[int, int], processes: Mapping[int, AgentRank]):
        self._request, self._answers = world / REQUEST, logs / ANSWERS
        self._pages, self._processes = pages, processes
        self._lock = threading.Lock()
        self._killed: dict[int, RankStack] = {}
        self._unwritten: list[RankStack] = []
        self._answered = self._refused = ""

    def start(self) -> None:
        """Answer requests from now on."""
        threading.Thread(target=self._run, name="stacks", daemon=True).start()

    def keep(self, rank: int) -> None:
        """Take the stacks of a rank that is to be killed, for later requests and the log folder."""
        if self._lock.acquire(timeout=LOCK_S):
            try:
                self._killed[rank] = self._look(rank)
                self._unwritten.append(self._killed[rank])
            finally:
                self._lock.release()

    def _run(self) -> None:
        while True:
            try:
                while self._unwritten:
                    self._write(KILLED, self._unwritten.pop())
                if (request := self._read()) is not None and request.id != self._answered:
                    self._answered = request.id
                    self._answer(request)
            except OSError as error:
                logger.warning("no answer about stacks: %s", error)
            time.sleep(POLL_S)

    def _read(self) -> StackRequest | None:
        """The request, if it is this user's and valid."""
        try:
            # Opening a file makes NFS look for a newer one.
            descriptor = os.open(self._request, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not about.st_size:
                return None
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
                self._refuse(f"it is not a file of user {os.geteuid()}, but of user {about.st_uid}")
                return None
            content = file.read(MAX_BYTES)
        try:
            return msgspec.json.decode(content, type=StackRequest)
        except (msgspec.DecodeError, RecursionError) as error:
            self._refuse(str(error))
            return None

    def _refuse(self, why: str) -> None:
        if why != self._refused:
            self._refused = why
            logger.warning("%s is no request for stacks: %s", self._request, why)

    def _answer(self, request: StackRequest) -> None:
        ranks = [rank for rank in self._processes if request.ranks is None or rank in request.ranks]
        with self._lock, ThreadPoolExecutor(MAX_PARALLEL) as pool:
            found = list(pool.map(self._look, ranks))
        for one in found:
            self._write(request.id, one)

    def _look(self, rank: int) -> RankStack:
        process = self._processes[rank]
        if rank in self._killed:
            return self._killed[rank]
        if process.returncode is not None:
            why = f"the process has ended with exit code {process.returncode}"
            return RankStack(rank, socket.gethostname(), process.pid, missing=why)
        return RankStack.of(rank, process.pid, self._pages[rank])

    def _write(self, request: str, found: RankStack) -> None:
        folder = self._answers / request
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(answer_path(folder, found.rank), found.text().encode())


def prepare_requests(world: Path) -> None:
    """Forget requests to an earlier start. The file then exists: NFS may remember for a minute that there is none."""
    with contextlib.suppress(OSError):
        (world / REQUEST).write_bytes(b"")


def request_stacks(run_dir: Path, attempt: int, ranks: Collection[int] | None = None) -> Path:
    """Request stacks from the agents of an attempt; returns the folder of the answers. OSError if the folder cannot be
    written; PermissionError also if another user owns it."""
    world = world_folder(run_dir, attempt)
    if (owner := world.stat().st_uid) != os.geteuid():
        raise PermissionError(f"{run_dir} belongs to user {_user(owner)}, whose agents answer only to that user")
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    request = StackRequest(f"{now}-{secrets.token_hex(4)}", None if ranks is None else sorted(ranks))
    folder = log_folder(run_dir, attempt) / ANSWERS / request.id
    folder.mkdir(parents=True)
    write_durably(world / REQUEST, msgspec.json.encode(request), writer=request.id)
    return folder


def read_answers(folder: Path, ranks: Collection[int]) -> dict[int, RankStack]:
    """The answers about these ranks that have arrived in a folder."""
    found = {rank: RankStack.read(answer_path(folder, rank)) for rank in ranks}
    return {rank: one for rank, one in found.items() if one is not None}


def answer_path(folder: Path, rank: int) -> Path:
    """The answer about a rank in a request's folder."""
    return folder / f"rank_{rank:04d}.txt"


class LocalRank(NamedTuple):
    """A rank's process on this host, and the path of its page below /proc."""

    pid: int
    page: Path

    def look(self, rank: int) -> RankStack:
        """Its answer, without an agent."""
        try:
            page = os.open(self.page, os.O_RDWR)
        except (FileNotFoundError, ProcessLookupError):
            return RankStack(rank, socket.gethostname(), self.pid, missing="the process has ended")
        except OSError as error:
            return RankStack(rank, socket.gethostname(), self.pid, missing=f"its page cannot be read: {error}")
        try:
            return RankStack.of(rank, self.pid, page)
        finally:
            os.close(page)


def ask_ranks(processes: Mapping[int, LocalRank]) -> dict[int, RankStack]:
    """The answers of ranks of this host, without an agent, all at the same time."""
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        return dict(zip(processes, pool.map(lambda rank: processes[rank].look(rank), processes), strict=True))


def find_ranks(run_dir: Path) -> dict[int, LocalRank]:
    """The ranks of a run on this host that belong to this user. A child process that has a rank's name is younger than
    the rank."""
    found: dict[int, tuple[int, LocalRank]] = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            named = RANK_NAME.fullmatch((process / "comm").read_text().strip())
            if named is None:
                continue
            words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            folder = Path(os.readlink(process / "cwd"), os.fsdecode(words[-1])).resolve()
            page = page_of(int(process.name)) if folder == run_dir.resolve() else None
            if page is not None:
                rank, age = int(named[1]), int(born(int(process.name)))
                one = age, LocalRank(int(process.name), page)
                found[rank] = min(found.get(rank, one), one, key=lambda each: each[0])
    return {rank: one for rank, (_, one) in sorted(found.items())}


def _user(uid: int) -> str:
    import pwd  # reads the site's directory of users

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
