"""Run environments (env.NAME.runs_in): turns in threads, turns as tasks of one event loop, or episodes in processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from hpcrl.config import Config, EnvConfig
from hpcrl.envs.environment import Env
from hpcrl.envs.factory import check_env, make_env, runs_in
from hpcrl.envs.processes import EnvProcess, EnvProcesses, busy_s, computed_s
from hpcrl.rewards.serving.guarded import RAISED

WhenOver = Callable[[Any], object]
"""Called with a turn's result or exception, in the thread or event loop that played it."""
MAX_WAITING = 32
"""Default maximum of concurrent turns per section if turns mostly wait."""
SEEN_S, BUSY_SHARE = 0.05, 0.1
"""After SEEN_S seconds, a turn that was busy for less than BUSY_SHARE of its time counts as waiting. The share is
small because a computing thread gets only the CPU time that other threads leave it."""
LOOK_S, BUSY_S = 1.0, 1.0
"""Seconds between two checks of timed-out turns, and seconds of computing after which such a turn is interrupted."""
CLOSE_S = 5.0
"""Seconds that environments' close() may take when the rank ends."""


class StartedTurn:
    """A turn in progress. `stop` ends it if possible; `busy_s` returns the seconds in which its thread or process was
    not waiting."""

    def __init__(self, stop: Callable[[], object], busy_s: Callable[[], float] = lambda: 0.0):
        self.stop, self._busy_s = stop, busy_s
        self._began, self._before_s = time.monotonic(), busy_s()

    def waits(self) -> bool:
        """Whether the turn mostly waits."""
        passed_s = time.monotonic() - self._began
        return passed_s > SEEN_S and self._busy_s() - self._before_s < BUSY_SHARE * passed_s


class Hosts:
    """An env rank's threads, event loop and processes."""

    def __init__(self, config: Config, chat_template: str):
        """ValueError if a section names no valid environment. `chat_template` is the model's."""
        self._template, self._deterministic = chat_template, config.deterministic
        self._processes: dict[str, EnvProcesses] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._where: dict[str, str] = {}
        self._closing: set[threading.Thread] = set()
        self._given_up: list[TurnThread] = []
        self._looked = 0.0
        self._lock = threading.Lock()
        try:
            for section, env in config.envs.items():
                check_env(env, section, chat_template)
                self._where[section] = runs_in(env, section)
                if self._where[section] == "process":
                    self._processes[section] = EnvProcesses(env, section)
        except ValueError:
            self.close()
            raise

    def make(self, section: str, config: EnvConfig, row: dict[str, Any]) -> Env:
        """Create an environment for a row. Raises whatever its constructor raises."""
        processes = self._processes.get(section)
        return make_env(config, row, self._template) if processes is None else processes.make(row, self._template)

    def plays_here(self, section: str) -> bool:
        """Whether a section's code runs in this process, and may crash it."""
        return self._where[section] != "process"

    def has_room(self, section: str, config: EnvConfig, started: Sequence[StartedTurn]) -> bool:
        """Whether another turn of the section may start while these run. The number of tasks is not limited."""
        if self._where[section] == "task":
            return True
        if config.num_threads is not None or self._deterministic:
            return len(started) < (config.num_threads or 1)
        at_work = 1 if self._where[section] == "thread" else len(os.sched_getaffinity(0))
        return len(started) < MAX_WAITING and sum(not one.waits() for one in started) < at_work

    def start(self, section: str, work: Coroutine[Any, Any, Any], ended: WhenOver, env: Env | None) -> StartedTurn:
        """Start a turn; `env` is its environment, if already created. RuntimeError if its processes cannot fork."""
        if (processes := self._processes.get(section)) is not None:
            processes.check()
        if self._where[section] == "task":
            return StartedTurn(asyncio.run_coroutine_threadsafe(_to_end(work, ended), self._running_loop()).cancel)
        thread = TurnThread(work, ended)
        busy = env.busy_s if isinstance(env, EnvProcess) else thread.busy_s
        return StartedTurn(lambda: self._given_up.append(thread), busy)

    def interrupt_busy(self) -> None:
        """Interrupt stopped turns that still compute, because they slow all other threads. A stopped turn that waits
        may still return; its environment is then closed."""
        if (now := time.monotonic()) < self._looked + LOOK_S:
            return
        self._looked = now
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        for thread in self._given_up:
            if thread.used_s() > BUSY_S:
                thread.interrupt()

    async def returned(self, section: str, value: Any) -> Any:
        """Result of an environment's method, awaited if needed. TypeError for a coroutine outside the event loop."""
        if not inspect.isawaitable(value):
            return value
        if self._where[section] != "task":
            if inspect.iscoroutine(value):
                value.close()
            raise TypeError(f"its methods are coroutines; use env.{section}.runs_in=task")
        return await value

    def end(self, env: Env) -> None:
        """Close an environment in a new thread, because close() may block. Errors are ignored, since the sample already
        has its result."""
        if isinstance(env, EnvProcess):
            env.close()  # does not block
        elif close := getattr(env, "close", None):
            thread = threading.Thread(target=self._close, args=(close,), name="close", daemon=True)
            with self._lock:  # close() must not join a thread that has not started
                self._closing.add(thread)
                thread.start()

    def _close(self, close: Callable[[], Any]) -> None:
        with contextlib.suppress(*RAISED):
            if inspect.iscoroutine(closing := close()):
                asyncio.run_coroutine_threadsafe(closing, self._running_loop())
        self._closing.discard(threading.current_thread())

    def close(self) -> None:
        """End the processes and the event loop, after the close() of environments."""
        end = time.monotonic() + CLOSE_S
        with self._lock:
            closing = list(self._closing)
        for thread in closing:
            thread.join(max(0.0, end - time.monotonic()))
        for processes in self._processes.values():
            processes.close()
        if self._loop is not None:
            ended = asyncio.run_coroutine_threadsafe(_others(), self._loop)
            with contextlib.suppress(Exception):
                ended.result(CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
            return self._loop


async def _to_end(work: Coroutine[Any, Any, Any], ended: WhenOver) -> None:
    try:
        result = await work
    except BaseException as error:  # user code may call sys.exit
        result = error
    ended(result)


async def _others() -> None:
    """Wait for all other tasks of the event loop."""
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)


class TurnThread:
    """A thread for a turn. It is a daemon: an environment that hangs never frees its thread, so nothing may join it."""

    def __init__(self, work: Coroutine[Any, Any, Any], ended: WhenOver):
        """`work` is a coroutine that never suspends."""
        self._work, self._ended = work, ended
        self._lock, self._over = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def used_s(self) -> float:
        """The thread's CPU time in seconds; 0 if it has ended."""
        return computed_s(f"self/task/{self._thread.native_id}")

    def busy_s(self) -> float:
        """Seconds in which the thread was not waiting."""
        return busy_s(f"self/task/{self._thread.native_id}")

    def interrupt(self) -> None:
        """Raise SystemExit in the thread. This ends a loop in Python; a call into C is not interrupted."""
        with self._lock:  # keeps the thread alive
            if not self._over and self._thread.ident is not None:
                ident = ctypes.c_ulong(self._thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))

    def _run(self) -> None:
        result: Any
        try:
            self._work.send(None)
            result = AssertionError("a turn waits outside the event loop")
        except StopIteration as returned:
            result = returned.value
        except BaseException as error:  # user code may call sys.exit
            result = error
        with self._lock:
            self._over = True
        self._ended(result)
