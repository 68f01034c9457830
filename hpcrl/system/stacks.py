"""The Python stacks of a process of a run, readable from outside even while the process hangs.

On a signal, faulthandler writes the stacks of all threads to a memory page of the process. The signal's handler is C
code that needs neither the interpreter lock nor a file system, so it also works while native code holds the lock or a
disk does not answer. It does not run in a process that a signal has stopped, or that waits in the kernel without
interruption; then only the kernel's facts about the process are known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

# Real-time signals in the middle of the range: batch systems, MPI, NCCL, vLLM and DeepSpeed send SIGUSR1, SIGUSR2 or
# SIGTERM, glibc uses the first real-time signals, and debuggers and profilers use the first or the last ones.
ALL_THREADS, MAIN_THREAD = signal.SIGRTMIN + 11, signal.SIGRTMIN + 12
PAGE_NAME = "hpcrl trace"
STACKS_AT = 4096
"""Offset of the stacks in the page; before them is a rank's activity (hpcrl.messaging.trace)."""
WITHIN_S, CHILD_S = 1.0, 0.3
"""How long a rank, or a process that it started, may take to write its stacks."""
MAX_CHILDREN, MAX_BYTES = 16, 1 << 20
POLL_S = 0.01
THREAD = re.compile(r"^(Current thread|Thread|Stack)(?: (0x[0-9a-f]+))? \(most recent call first\):\n", re.MULTILINE)
BOOTSTRAP = re.compile(r'^  File ".*/threading\.py", line \d+ in _bootstrap(_inner)?\n?', re.MULTILINE)
TRUNCATED = "\n..."  # faulthandler's limit is 100 threads; the main thread comes last
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


def register_stacks(descriptor: int) -> None:
    """Make this process write its stacks to the page `descriptor` when it gets one of the two signals."""
    faulthandler.register(ALL_THREADS, file=descriptor, all_threads=True, chain=False)
    faulthandler.register(MAIN_THREAD, file=descriptor, all_threads=False, chain=False)


def read_stacks(pid: int, descriptor: int, within_s: float = WITHIN_S) -> ProcessStack:
    """Ask a process for its stacks and wait for them, at most within_s. `descriptor` is its page. Only one process may
    do so at a time."""
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
    text, whole = _ask(pid, descriptor, ALL_THREADS, end)
    if whole and text.endswith(TRUNCATED):
        text, whole = _ask(pid, descriptor, MAIN_THREAD, end)
    kernel = _kernel(pid)
    if not text and _has_ended(_status(pid)):
        return ProcessStack("", "the process has ended", kernel)
    if not text:
        return ProcessStack("", f"the process gave none within {within_s:g} s: it {kernel}", kernel)
    return ProcessStack(_in_order(text), "" if whole else "the stack may be incomplete", kernel)


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
    """Name, state and stacks of each process that a process has started, of at most MAX_CHILDREN."""
    children, told = children_of(pid), []
    for child in children[:MAX_CHILDREN]:
        name, page = _status(child).get("Name", "ended"), page_of(child)
        found = ProcessStack("", "", _kernel(child))
        with contextlib.suppress(OSError):
            if page is not None:
                descriptor = os.open(page, os.O_RDWR)
                try:
                    found = read_stacks(child, descriptor, CHILD_S)
                finally:
                    os.close(descriptor)
        told.append(f"child process {child} ({name}): {found.kernel}" + f"\n{found.stacks}" * bool(found.stacks))
    return [*told, *([f"and {len(children) - MAX_CHILDREN} more"] * (len(children) > MAX_CHILDREN))]


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
    """faulthandler's text with the main thread first, each thread after a blank line."""
    heads = list(THREAD.finditer(text))
    threads = []
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        frames = BOOTSTRAP.sub("", text[head.end() : following.start() if following else len(text)]).rstrip(".\n")
        is_main = head[1] != "Thread"
        name = "main thread" if is_main else f"thread {head[2]}"
        threads.append((not is_main, f"{name} (most recent call first):\n{frames}"))
    if any(head[1] == "Stack" for head in heads):
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
