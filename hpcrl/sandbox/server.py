"""A sandbox's server: forks a confined child for each task, watches the process tree, ends it, and removes its files.

    python -s -S -P -c "..." SETTINGS        started by hpcrl.sandbox.client, standard input is its socket

It runs one job at a time: one or more tasks, until the last has ended. Code and results do not pass through it, but
through pipes between the client and the children. When its client ends, it ends the job and exits.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import resource
import select
import signal
import site
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from hpcrl.sandbox import confine
from hpcrl.sandbox.tasks import CHANNEL, IGNORED, perform
from hpcrl.system.scratch import own_folder, remove_tree

FDS = 6  # file descriptors of a task: the task itself, standard input, output, error, RESULT, CHANNEL
MAX_TASKS = 2
TICK_S, FIRST_TICK_S = 0.05, 0.005
ROOM = "/room"
MAX_FILES = 1000
THREADS = 16
"""Limit for a program that may not start other processes."""
CHOSEN_USER, NUM_USERS = 61184, 4336
"""As root, a server's children become one of these users, who own nothing."""
SIGNALS = [signal.Signals(number) for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP)]


class SandboxServer:
    """One sandbox. settings: level, folder, memory_bytes, file_bytes, processes."""

    def __init__(self, settings: Mapping[str, Any]):
        self._settings = settings
        self._level: int = settings["level"]
        self._control = socket.socket(fileno=os.dup(0))
        self._is_root = os.geteuid() == 0
        self._user = CHOSEN_USER + os.getpid() % NUM_USERS
        self._proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
        self._readable = confine.readable_paths(settings["packages"])
        self._base = own_folder(settings["folder"], "hpcrl-sandbox")
        if self._is_root:
            os.chmod(self._base, 0o711)
        needed = [*self._readable, self._base]
        self._reads_all = self._is_root and self._level < 3 and confine.hidden_from_others(needed)
        self._others = 0
        self._statuses: dict[int, int] = {}
        self._mounted = False

    def run(self) -> NoReturn:
        """Serve until the client ends."""
        try:
            self._enter()
            self._send({"ready": True, "landlock": confine.landlock_version()})
        except OSError as error:
            self._send({"problem": str(error)})
            self._leave()
        while True:
            data, places, _, _ = socket.recv_fds(self._control, 1 << 16, FDS * MAX_TASKS)
            if not data:
                self._leave()
            request = json.loads(data)
            if "tasks" in request:  # an "end" may arrive after the job has ended
                self._send(self._job(request, places))

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(message).encode())

    def _leave(self) -> NoReturn:
        self._end_tree()
        if self._level < 3:
            remove_tree(self._base)
        os._exit(0)

    def _enter(self) -> None:
        """Enter the namespaces. Returns in the child process that will serve; its parent waits for it."""
        if self._level >= 2:
            confine.leave_namespaces()
            child = os.fork()
            if child:
                _wait_and_leave(child, self._base)
            confine.die_with(0)  # the parent is in another PID namespace
        self._room = self._base
        if self._level >= 3:
            confine.enter_new_root(self._base, self._readable, ROOM)
            self._room = ROOM
        confine.adopt_orphans()
        self._wake, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if self._level == 1:
            self._read(f"self/task/{os.getpid()}/children")  # OSError if the kernel does not list children

    def _job(self, request: Mapping[str, Any], places: list[int]) -> dict[str, Any]:
        """Run tasks until the last has ended; returns its wait status and, if a limit ended the job, which."""
        self._statuses = {}
        reason = ""
        try:
            if request["keep_files"]:
                make_executable(f"{self._room}/0")
            else:
                self._make_room()
            if not confined_by_user(self._is_root, self._level):
                self._others = _num_threads_of(self._proc, os.getuid())
            children = [self._start(n, request, places[n * FDS : (n + 1) * FDS]) for n in range(request["tasks"])]
        except OSError as error:
            self._end_tree()
            return {"status": 0, "reason": f"lost: {error}"}
        finally:
            for place in places:
                os.close(place)
        tick, checked = FIRST_TICK_S, time.monotonic()
        while not reason and children[-1] not in self._statuses:
            ready, _, _ = select.select([self._wake, self._control.fileno()], [], [], tick)
            if self._control.fileno() in ready:
                if not self._control.recv(1 << 12):
                    self._leave()
                reason = "ended"
            if self._wake in ready:
                os.read(self._wake, 1 << 12)
            self._reap()
            if not ready or time.monotonic() - checked > TICK_S:  # constant exits of children do not postpone the check
                tick = min(2 * tick, TICK_S)
                reason = reason or self._exceeded(request)
                checked = time.monotonic()
        if reason == "ended" and children[-1] in self._statuses:
            reason = ""  # the job ended by itself, before the client's message was read
        self._end_tree()
        return {"status": self._statuses.get(children[-1], 0), "reason": reason}

    def _start(self, number: int, request: Mapping[str, Any], places: list[int]) -> int:
        folder = f"{self._room}/{number}"
        if not os.path.isdir(folder):
            os.mkdir(folder, 0o700)
            if self._is_root:
                os.chown(folder, self._user, self._user)
        parent = os.getpid()
        child = os.fork()
        if child:
            return child
        code = 70
        try:
            self._confine(request, folder, parent, places)
            with open(CHANNEL + 1, "rb") as source:
                task = json.loads(source.read())
            code = perform(task)
        except BaseException as error:
            os.write(2, f"the sandbox: {type(error).__name__}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(code)

    def _confine(self, request: Mapping[str, Any], folder: str, parent: int, places: list[int]) -> None:
        """In the child: set up its files and limits and, at L1 and above, all other restrictions."""
        settings = self._settings
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        high = [fcntl.fcntl(place, fcntl.F_DUPFD, 64) for place in places]
        for target, place in zip([CHANNEL + 1, *range(CHANNEL + 1)], high, strict=True):
            os.dup2(place, target)
        own = confined_by_user(self._is_root, self._level)
        rules = -1
        if confine.landlock_version() and self._level:
            rules = confine.landlock_rules(self._readable, [folder])
        if rules > CHANNEL + 2:
            os.dup2(rules, CHANNEL + 2)
            rules = CHANNEL + 2
        os.closerange(CHANNEL + 2 if rules < 0 else CHANNEL + 3, 4096)
        os.umask(0o077)
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder)
        most = settings["processes"]
        limited = most + MAX_TASKS + (0 if own else self._others)
        limited_to = limited if most > 1 else None
        confine.limit(settings["memory_bytes"], settings["file_bytes"], request["cpu_s"], limited_to)
        if self._is_root:
            confine.become(self._user, self._reads_all)
        confine.no_new_privileges()
        confine.die_with(parent)
        if rules >= 0:
            confine.enforce(rules)
        if self._level:
            confine.keep_capabilities((1 << confine.CAP_DAC_READ_SEARCH) if self._reads_all else 0)
            confine.filter_calls(processes=most > 1, signals=self._level >= 2)
        gc.enable()

    def _make_room(self) -> None:
        """Create an empty folder for the tasks' folders."""
        if self._level >= 3:
            if self._mounted:
                confine.unmount(self._room)
            confine.mount_room(self._room, 4 * self._settings["file_bytes"], MAX_FILES)
            self._mounted = True
            return
        for name in os.listdir(self._room):
            remove_tree(f"{self._room}/{name}")

    def _exceeded(self, request: Mapping[str, Any]) -> str:
        """The limit that the process tree exceeds, or empty."""
        tasks, num_bytes = 0, 0
        removed: dict[tuple[int, int], int] = {}
        for process in self._descendants():
            if 0 < self._level < 3:
                removed |= self._removed(process)
            with contextlib.suppress(OSError, IndexError, ValueError):
                text = self._read(f"{process}/stat")
                fields = text[text.rindex(")") + 2 :].split()
                tasks += int(fields[17])
                num_bytes += int(fields[21]) * resource.getpagesize()
        most = self._settings["processes"]
        if tasks > (most if most > 1 else THREADS) + request["tasks"] - 1:
            return "processes"
        if num_bytes > self._settings["memory_bytes"]:
            return "memory"
        if 0 < self._level < 3 and not fits(self._room, 4 * self._settings["file_bytes"] - sum(removed.values())):
            return "files"
        return ""

    def _removed(self, process: str) -> dict[tuple[int, int], int]:
        """(device, inode) -> bytes of removed files that a process still has open or mapped. A file that is only
        mapped, or in transit through a socket, has an unknown size and counts as the largest."""
        found: dict[tuple[int, int], int] = {}
        most = self._settings["file_bytes"]
        with contextlib.suppress(OSError):  # the process has ended
            for line in self._read(f"{process}/maps").splitlines():
                *_, device, number, path = line.split(None, 5) if line.endswith(" (deleted)") else ("0:0", "0", "")
                if path.startswith(f"{self._room}/"):
                    found[os.makedev(*(int(part, 16) for part in device.split(":"))), int(number)] = most
            for name in _names(f"{process}/fd", self._proc):
                with contextlib.suppress(OSError):
                    known = os.stat(f"{process}/fd/{name}", dir_fd=self._proc)
                    if stat.S_ISREG(known.st_mode) and not known.st_nlink:
                        found[known.st_dev, known.st_ino] = known.st_blocks * 512
                    elif stat.S_ISSOCK(known.st_mode):
                        waiting = self._read(f"{process}/fdinfo/{name}").partition("scm_fds:")[2].split()
                        found[known.st_dev, known.st_ino] = most * int(waiting[0]) if waiting else 0
        return found

    def _read(self, path: str) -> str:
        with open(os.open(path, os.O_RDONLY, dir_fd=self._proc), encoding="utf-8", errors="replace") as file:
            return file.read()

    def _descendants(self) -> Iterator[str]:
        """The descendants' process ids in /proc, which may belong to another PID namespace."""
        waiting = ["self"]
        while waiting:
            process = waiting.pop()
            try:
                files = [f"{process}/task/{thread}/children" for thread in _names(f"{process}/task", self._proc)]
                found = [child for file in files for child in self._read(file).split()]
            except OSError:
                continue  # the process has ended
            yield from found
            waiting += found

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._statuses[found[0]] = found[1]

    def _end_tree(self) -> None:
        """Kill all descendants and reap them."""
        while True:
            if self._level >= 2:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)  # all processes of the namespace except this one
            else:
                for process in list(self._descendants()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)
            try:
                while True:
                    found = os.waitpid(-1, os.WNOHANG)
                    if not found[0]:
                        break
                    self._statuses.setdefault(*found)
            except ChildProcessError:
                return
            select.select([self._wake], [], [], 0.002)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 1 << 12)


def confined_by_user(is_root: bool, level: int) -> bool:
    """Whether the children have a user id of their own, so the kernel counts no other processes for it."""
    return is_root or level >= 2


def _names(folder: str, proc: int) -> list[str]:
    """The names in a folder of /proc."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    try:
        return os.listdir(place)
    finally:
        os.close(place)


def _num_threads_of(proc: int, user: int) -> int:
    """Number of a user's threads on this machine."""
    count = 0
    for name in _names(".", proc):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=proc).st_uid == user:
                    count += len(_names(f"{name}/task", proc))
    return count


def _wait_and_leave(child: int, base: str) -> NoReturn:
    """Outside the namespaces: wait for the server, and remove the rest of its folder."""
    for number in SIGNALS:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN if number != signal.SIGCHLD else signal.SIG_DFL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    remove_tree(base)
    os._exit(0)


def make_executable(folder: str) -> None:
    """Make a folder's files executable, which a confined compiler may not do."""
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            place = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            known = os.fstat(place)
            if stat.S_ISREG(known.st_mode) and known.st_nlink == 1:
                os.fchmod(place, 0o700)
            os.close(place)


def fits(folder: str, num_bytes: int) -> bool:
    """Whether a folder's files are within both limits and countable (none too deep or in an unreadable folder)."""
    waiting, files, total = [folder], 0, 0
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    files += 1
                    if files > MAX_FILES:
                        return False
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return total <= num_bytes


def main() -> None:
    """Serve with the settings from the command line."""
    settings = json.loads(sys.argv[1])
    sys.path += settings["packages"]
    site.setquit()  # exit() and quit() of interactive Python, which programs use
    server = SandboxServer(settings)
    gc.collect()
    gc.freeze()
    gc.disable()
    server.run()
