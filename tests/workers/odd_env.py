"""Environments that behave like some users' environments."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np

OPEN: set[int] = set()
"""Those that were made and not closed."""
MEETING = threading.Barrier(2, timeout=20)
RELEASE = threading.Event()
MADE_LATE: list[str] = []
SEEDS: list[int] = []
AT_WORK: list[str] = []
IMAGES: list[Any] = []
ENDLESS = "again " * 10_000_000


class Echo:
    """Repeats the response."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return action, 0.0, False, False, {}


class MarkedEcho(Echo):
    """Receives special tokens."""

    special_tokens = True


class OddEnv:
    """`how` is the prompt's answer, so that each sample chooses; `hint` is a column of its row."""

    def __init__(self, answer: Any = "", hint: str = ""):
        self._how, self._turn, self._hint = answer, 0, hint
        if answer == "is made slowly":
            RELEASE.wait(60)
            MADE_LATE.append("made")
        OPEN.add(id(self))

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        SEEDS.append(int(np.random.RandomState(seed).randint(1 << 30)))
        match self._how:
            case "board":
                return f"go {self._hint}", {}
            case "does not begin":
                raise OSError("no game")
            case "begins oddly":
                return "go"  # type: ignore[return-value]
            case "around":
                return "go ", {"prefix": "Game. ", "suffix": "P__"}
            case "is over":
                return "", {"terminated": True, "metrics": {"success": 1.0}}
            case "is cut":
                return "", {"truncated": True}
            case "long board":
                return "again " * 1000, {}
        return "", {}

    def close(self) -> None:
        if self._how == "closes slowly":
            RELEASE.wait(60)
        OPEN.remove(id(self))
        if self._how == "is made slowly":
            MADE_LATE.append("closed")
        if self._how == "close":
            raise OSError("cannot close")

    def step(self, action: str) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._turn += 1
        over = self._turn == 2
        match self._how:
            case "meets":
                MEETING.wait()
            case "around":
                return "Moved.", 0.5, over, False, {"suffix": "_P_", "admissible_commands": ["up"], "metrics": {}}
            case "around messages":
                said = [{"role": "tool", "content": "a", "name": "f"}, {"role": "user", "content": "b"}]
                return said, 0.5, over, False, {"prefix": "1 ", "suffix": "2"}
            case "naps":
                time.sleep(0.875)
                return "", 0.5, True, False, {}
            case "works":
                AT_WORK.append("begins")
                end = time.thread_time() + 0.3
                while time.thread_time() < end:
                    pass
                AT_WORK.append("ends")
                return "", 0.5, True, False, {}
            case "hangs":
                RELEASE.wait(60)
            case "times out":
                raise TimeoutError("the server does not answer")
            case "is cancelled":
                raise asyncio.CancelledError
            case "is interrupted":
                raise KeyboardInterrupt
            case "raises":
                raise KeyError("\udcff" + "x" * (5 << 20))
            case "no text":
                return {"board": 1}, 0.5, False, False, {}
            case "nan":
                return "", float("nan"), False, False, {}
            case "endless metric":
                return "", 0.5, True, False, {"metrics": {"success": float("inf")}}
            case "huge":
                return "", 1e39, False, False, {}
            case "odd name":
                return "", 0.5, False, False, {"metrics": {"a\ud800": 1.0}}
            case "forgets":
                return "", 0.5, False, False
            case "no info":
                return "", 0.5, False, False, ["metrics"]
            case "an image":
                return [{"role": "user", "content": "<image>", "images": [IMAGES[-1]]}], 0.5, False, False, {}
            case "no images":
                return [{"role": "user", "content": "again", "images": None}], 0.5, False, False, {}
            case "computes":
                while True:
                    self._turn += 1
            case "lone surrogate":
                return "\udcff", 0.5, False, False, {}
            case "an object at the end" if over:
                return [{"role": "user", "content": "again", "board": object()}], 0.5, True, False, {}
            case "no number":
                return "again", "much", False, False, {}
            case "long":
                return "again " * 1000, 0.25, False, False, {}
            case "endless":
                return ENDLESS, 0.25, False, False, {}
            case "endless tool":
                return [{"role": "tool", "content": ENDLESS, "name": "f"}], 0.25, False, False, {}
            case "endless name":
                return [{"role": "tool", "content": "42", "name": ENDLESS}], 0.25, False, False, {}
            case "endless dialogue":
                return [{"role": "user", "content": ""}] * 100_000, 0.25, False, False, {}
            case "endless at the end" if over:
                return ENDLESS, 0.25, True, False, {}
            case "empty" | "no message":
                return "" if self._how == "empty" else [], 0.25, over, False, {}
        done = np.bool_(over)
        return "again", np.float32(0.25), done, np.bool_(False), {"metrics": {"success": np.float64(over), "n": 1}}


class Waiting(OddEnv):
    """An environment whose methods are coroutines."""

    runs_in = "task"

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        return super().reset(seed)

    async def step(self, action: str) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # type: ignore[override]
        if self._how == "hangs":
            await asyncio.sleep(600)
        if self._how == "meets":
            await TOGETHER.meet()
        return super().step(action) if self._how != "meets" else ("again", 0.5, False, False, {})

    async def close(self) -> None:  # type: ignore[override]
        super().close()


class Rendezvous:
    """A meeting point of several tasks."""

    def __init__(self, count: int):
        self._missing, self._all = count, asyncio.Event()

    async def meet(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._all.set()
        await self._all.wait()


TOGETHER = Rendezvous(20)
