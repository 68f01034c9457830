"""The Python stacks of a process of a run, readable from outside even while the process hangs.

A thread of the process, which needs the interpreter lock, writes the stacks of all threads to a memory page. If it
cannot, since native code holds the lock, faulthandler does, on a signal: its handler is C code that needs neither the
lock nor a file system. It may read the frames of another thread only while no thread executes Python code, which could
free them meanwhile and so crash the process; in doubt it writes only those of the main thread, which it interrupts. A
thread that waits for the lock wakes 200 times a second: so it differs from one that is stopped or gets no CPU.
The handler does not run in a process that a signal has stopped, or that waits in the kernel without interruption; then
only the kernel's facts about the process are known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import mmap
import os
import re
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import NamedTuple

# Real-time signals in the middle of the range: batch systems, MPI, NCCL, vLLM and DeepSpeed send SIGUSR1, SIGUSR2 or
# SIGTERM, glibc uses the first real-time signals, and debuggers and profilers use the first or the last ones.
ALL_THREADS, MAIN_THREAD = signal.SIGRTMIN + 11, signal.SIGRTMIN + 12
PAGE_NAME = "hpcrl trace"
STACKS_AT = 4096
"""Offset of the stacks in the page; before them is a rank's activity (hpcrl.messaging.trace)."""
ANSWERER_AT = 4056
"""Offset of the number of the request or 0, the number of the last answer, the process whose thread answers or 0, the
kernel's number of this thread, and the monotonic time at which it last looked for a request: five numbers of eight
bytes. Each request has another number, so a late answer to one is not taken for the answer to the next."""
_ANSWERER = struct.Struct("=qqqqd")
_ASKED, _ANSWERED, _PROCESS, _THREAD, _LOOKED = (ANSWERER_AT // 8 + place for place in range(5))
LOOK_S, SILENT_S, WAKES = 0.25, 3.0, 40
"""Seconds between two looks of the thread that answers. If it has not looked for SILENT_S, and wakes WAKES times while
it is asked without a look, native code holds the lock."""
WITHIN_S, CHILD_S, CHILDREN_S, THREAD_SHARE = 1.0, 0.5, 1.0, 0.7
"""How long a rank, a process that it started, or all of these may take to write their stacks, and the part of this time
after which a main thread is asked."""
MAX_CHILDREN, MAX_BYTES = 16, 1 << 20
MAX_THREADS, MAX_FRAMES = 100, 100  # faulthandler's limits
POLL_S = 0.01
THREAD = re.compile(r"^(Current thread|Thread|Stack)(?: (0x[0-9a-f]+))? \(most recent call first\):\n", re.MULTILINE)
BOOTSTRAP = re.compile(r'^  File ".*/threading\.py", line \d+ in _bootstrap(_inner)?\n?', re.MULTILINE)
TRUNCATED = "\n..."  # of more than MAX_THREADS; faulthandler writes the main thread last
STATES = {"R": "runs", "S": "sleeps", "D": "waits in the kernel without interruption", "T": "stopped by a signal"}
STATES |= {"t": "stopped by a debugger", "Z": "has ended", "X": "has ended", "I": "idle"}


class ProcessStack(NamedTuple):
    """What is known about a process. `stacks` is empty if it gave none, with the reason in `missing`. `kernel`
    has its state, and where the kernel may be asked, the system call and the kernel function in which it waits."""

    stacks: str
    missing: str
    kernel: str


def new_page() -> int:
    """File descriptor of an empty page, which a process that writes to it must inherit."""
    descriptor = os.memfd_create(PAGE_NAME)
    os.truncate(descriptor, STACKS_AT)
    # Stacks are appended: the offset is shared by all processes that have the descriptor.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


def page_of(pid: int) -> Path | None:
    """Path of the page of another process; None if it has none, or belongs to another user."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(path).startswith(f"/memfd:{PAGE_NAME} "):
                return path
    return None


def register_stacks(descriptor: int, *, forks: bool = False) -> None:
    """Make this process write its stacks to the page `descriptor` when it is asked. A process that forks has no thread
    that answers, and so gives only the stack of its main thread."""
    faulthandler.register(ALL_THREADS, file=descriptor, all_threads=True, chain=False)
    faulthandler.register(MAIN_THREAD, file=descriptor, all_threads=False, chain=False)
    if not forks:
        threading.Thread(target=_answer_forever, args=[descriptor], name="stacks", daemon=True).start()


def read_stacks(pid: int, descriptor: int, within_s: float = WITHIN_S) -> ProcessStack:
    """Ask a process for its stacks and wait for them, at most within_s, and before as long for another reader of
    `descriptor`, its page: only one may ask at a time, since both would empty the page."""
    with _alone(descriptor, within_s) as alone:
        if alone:
            return _read_alone(pid, descriptor, within_s)
    return ProcessStack("", f"another reader has asked the process for more than {within_s:g} s", _kernel(pid))


@contextlib.contextmanager
def _alone(descriptor: int, within_s: float) -> Iterator[bool]:
    """Keep other readers of a page out, in this process or others; False if one of them does not end within_s. The lock
    is of a file of its own, which ends with the reader, since ranks and agents share `descriptor`."""
    own, end = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR), time.monotonic() + within_s
    try:
        while not (alone := _locked(own)) and time.monotonic() < end:
            time.sleep(POLL_S)
        yield alone
    finally:
        os.close(own)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_alone(pid: int, descriptor: int, within_s: float) -> ProcessStack:
    kernel = _kernel(pid)
    status = _status(pid)
    if _has_ended(status):
        return ProcessStack("", "the process has ended", kernel)
    if (state := status["State"][0]) in "Tt":
        return ProcessStack("", f"the process is {STATES[state]}", kernel)
    if not _has(status, "SigCgt", ALL_THREADS):  # the signal would end it
        return ProcessStack("", "the process has not come as far as to give its stack", kernel)
    end = time.monotonic() + within_s
    os.ftruncate(descriptor, STACKS_AT)
    (text, is_held), whole = _ask_thread(pid, descriptor, end - (1 - THREAD_SHARE) * within_s), True
    if text is None:
        number = ALL_THREADS if is_held else MAIN_THREAD
        text, whole = _ask(pid, descriptor, number, end)
        if whole and number == ALL_THREADS and text.endswith(TRUNCATED):
            text, whole = _ask(pid, descriptor, MAIN_THREAD, end)
    kernel = _kernel(pid)
    if stacks := _in_order(text):
        return ProcessStack(stacks, "" if whole else "the stack may be incomplete", kernel)
    if _has_ended(_status(pid)):
        return ProcessStack("", "the process has ended", kernel)
    return ProcessStack("", f"the process gave none within {within_s:g} s: it {kernel}", kernel)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and theirs; none on a kernel that does not list them."""
    found, left = list[int](), [pid]
    while left:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{left.pop()}/task").iterdir():
                children = [int(child) for child in (thread / "children").read_text().split()]
                found, left = [*found, *children], [*left, *children]
    return found


def read_child_stacks(pid: int) -> list[str]:
    """Name, state and stacks of each process that a process has started, of at most MAX_CHILDREN; after CHILDREN_S
    without stacks."""
    children, told, end = children_of(pid), [], time.monotonic() + CHILDREN_S
    shown = children[:MAX_CHILDREN]
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(MAX_CHILDREN) as pool:
        pages: dict[int, dict[int, int]] = {}  # inode -> process -> descriptor: forked processes share a page
        for child in shown:
            with contextlib.suppress(OSError):
                if (path := page_of(child)) is not None:
                    descriptor = os.open(path, os.O_RDWR)
                    opened.callback(os.close, descriptor)
                    pages.setdefault(os.fstat(descriptor).st_ino, {})[child] = descriptor
        groups = pool.map(lambda group: _read_in_turn(group, end), pages.values())
        found = {child: one for group in groups for child, one in group.items()}
    for child in shown:
        one = found.get(child) or ProcessStack("", "", _kernel(child))
        name = _status(child).get("Name", "ended")
        told.append(f"child process {child} ({name}): {one.kernel}" + f"\n{one.stacks}" * bool(one.stacks))
    return [*told, *([f"and {len(children) - MAX_CHILDREN} more"] * (len(children) > MAX_CHILDREN))]


def _read_in_turn(pages: Mapping[int, int], end: float) -> dict[int, ProcessStack]:
    """The stacks of processes, each with a descriptor of the page that they share, as far as the time suffices."""
    found = {}
    for child, descriptor in pages.items():
        if (left := end - time.monotonic()) > 0:
            with contextlib.suppress(OSError):
                found[child] = read_stacks(child, descriptor, min(CHILD_S, left))
    return found


def _answer_forever(descriptor: int) -> None:
    with (
        mmap.mmap(descriptor, STACKS_AT) as page,
        memoryview(page) as raw,
        raw.cast("q") as numbers,
        raw.cast("d") as times,
    ):
        times[_LOOKED], numbers[_THREAD] = time.monotonic(), threading.get_native_id()
        numbers[_PROCESS] = os.getpid()
        try:
            while True:
                times[_LOOKED] = time.monotonic()
                if (asked := numbers[_ASKED]) and asked != numbers[_ANSWERED]:
                    os.write(descriptor, f"{_mark(asked)}{_all_threads()}".encode())
                    numbers[_ANSWERED] = asked
                time.sleep(LOOK_S)
        finally:
            numbers[_PROCESS] = 0  # its silence then says nothing of the lock


def _mark(asked: int) -> str:
    return f"Answer {asked}\n"


def _all_threads() -> str:
    """The stacks of all threads but this one, in faulthandler's form, the main thread first."""
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = {number: frame for number, frame in sys._current_frames().items() if number != own}
    shown = sorted(frames, key=lambda number: number != main)
    parts = []
    for number in shown[: MAX_THREADS + 1]:
        head = "Current thread" if number == main else "Thread"
        parts.append(f"{head} {number:#018x} (most recent call first):\n{_calls(frames[number])}")
    return "\n".join(parts) + "..." * (len(shown) > MAX_THREADS + 1)


def _calls(frame: FrameType | None) -> str:
    lines: list[str] = []
    while frame is not None and len(lines) < MAX_FRAMES:
        file, function = _printable(frame.f_code.co_filename), _printable(frame.f_code.co_name)
        lines.append(f'  File "{file}", line {frame.f_lineno} in {function}\n')
        frame = frame.f_back
    return "".join(lines) + "  ...\n" * (frame is not None)


def _printable(name: str) -> str:
    """A name from user code: without line ends, which would look like another thread, and bytes that are no UTF-8."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def _ask_thread(pid: int, descriptor: int, end: float) -> tuple[str | None, bool]:
    """(what the process's thread writes, whether it does not answer since native code holds the lock). The text is None
    if the process has no such thread, or it does not answer."""
    with mmap.mmap(descriptor, STACKS_AT) as page, memoryview(page) as raw, raw.cast("q") as numbers:
        if numbers[_PROCESS] != pid:
            return None, False
        woken, is_held = _wakes(numbers[_THREAD]), False
        numbers[_ASKED] = asked = time.monotonic_ns()
        while numbers[_ANSWERED] != asked:
            # A process that was stopped, suspended or starved is silent, too, but its thread has not waited.
            is_held = _wakes(numbers[_THREAD]) - woken >= WAKES and _is_silent(pid, descriptor)
            if is_held or time.monotonic() > end or _has_ended(_status(pid)):
                numbers[_ASKED] = 0
                return None, is_held
            time.sleep(POLL_S)
    text = os.pread(descriptor, MAX_BYTES, STACKS_AT).decode(errors="replace")
    _, found, answer = text.rpartition(_mark(asked))  # before it may be a late answer to another request
    return (answer.strip("\n") if found else None), False


def _wakes(thread: int) -> int:
    """How often a thread of any process has begun to wait."""
    return int(_status(thread).get("voluntary_ctxt_switches", "0"))


def _is_silent(pid: int, descriptor: int) -> bool:
    """Whether the process has a thread that answers, and has not executed Python code in it for SILENT_S."""
    _, _, process, _, looked = _ANSWERER.unpack(os.pread(descriptor, _ANSWERER.size, ANSWERER_AT))
    return bool(process == pid and time.monotonic() - looked > SILENT_S)


def _ask(pid: int, descriptor: int, number: int, end: float) -> tuple[str, bool]:
    """(the page's text, whether the handler has finished)."""
    before = os.fstat(descriptor).st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    whole = ended = False
    while not (whole or ended) and time.monotonic() < end:
        time.sleep(POLL_S)
        status = _status(pid)
        ended = _has_ended(status)  # and writes nothing more
        # The kernel gives the signal to the main thread, and blocks it there while the handler runs.
        pending = any(_has(status, mask, number) for mask in ("SigPnd", "ShdPnd", "SigBlk"))
        whole = os.fstat(descriptor).st_size > before and not pending
    return os.pread(descriptor, MAX_BYTES, STACKS_AT).decode(errors="replace").strip("\n"), whole


def _in_order(text: str) -> str:
    """faulthandler's text with the main thread first, each thread after a blank line; empty without a whole head."""
    heads = list(THREAD.finditer(text))
    threads = []
    for head, end in zip(heads, [*(head.start() for head in heads[1:]), len(text)], strict=False):
        frames = BOOTSTRAP.sub("", text[head.end() : end]).rstrip(".\n")
        if f" in {_answer_forever.__name__}\n" in frames:
            continue
        is_main = head[1] != "Thread"
        name = "main thread" if is_main else f"thread {head[2]}"
        threads.append((not is_main, f"{name} (most recent call first):\n{frames}"))
    if (threads and text.endswith(TRUNCATED)) or any(head[1] == "Stack" for head in heads):
        threads.append((True, "further threads are not shown"))
    return "\n\n".join(shown for _, shown in sorted(threads, key=lambda thread: thread[0]))


def _kernel(pid: int) -> str:
    """A process's state, system call and kernel function, as far as the kernel tells."""
    state = _status(pid).get("State", "Z")[0]
    parts = [STATES.get(state, state)]
    for name in ("syscall", "wchan"):
        with contextlib.suppress(OSError):  # other users' processes, and kernels that do not tell
            told = Path(f"/proc/{pid}/{name}").read_text().split()
            if told and told[0] not in ("0", "running"):
                parts.append(f"{'system call' if name == 'syscall' else 'kernel function'} {told[0]}")
    return ", ".join(parts)


def _status(pid: int) -> dict[str, str]:
    """/proc/PID/status; empty if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def _has_ended(status: dict[str, str]) -> bool:
    """Also before its parent has asked for its exit code."""
    return status.get("State", "Z")[0] in "ZX"


def _has(status: dict[str, str], mask: str, number: int) -> bool:
    return bool(int(status.get(mask, "0"), 16) >> (number - 1) & 1)
