"""Environments that need a separate process."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RED = np.full((2, 3, 3), (255, 0, 0), np.uint8)


def _sleep_apart() -> int:
    """In a child: leave the session of its parent."""
    os.setsid()
    time.sleep(600)
    os._exit(0)


class RoughEnv:
    """`answer` chooses what a step does; `folder` gets the ids of its child processes and a record of close()."""

    def __init__(self, answer: str, folder: str):
        if answer == "cannot be made":
            raise OSError("no game")
        self._how, self._folder = answer, Path(folder)
        self._kept: list[bytes] = []

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return f"start {seed}", {"tools": [], "own": object()}

    def step(self, action: str) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        match self._how:
            case "exits":
                os._exit(3)
            case "leaves by sys.exit":
                raise SystemExit(3)
            case "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "leaks":
                while True:
                    self._kept.append(bytes(64 << 20))
            case "writes" | "writes and hangs":
                name = Path(tempfile.mkdtemp(), "file")
                name.write_bytes(bytes(1 << 20))
                (self._folder / "written").write_text(str(name))
                if self._how == "writes and hangs":
                    time.sleep(600)
            case "raises":
                raise KeyError("\udcff")
            case "endless":
                return "again " * 20_000_000, 0.5, False, False, {}
            case "no text":
                return "\udcff", 0.5, False, False, {}
            case "an object":
                return [{"role": "user", "content": object()}], 0.5, False, False, {}
            case "an image":
                return [{"role": "user", "content": "", "images": [RED, b"file"]}], 0.5, False, False, {}
            case "no image":
                return [{"role": "user", "content": "", "images": [RED / 2]}], 0.5, False, False, {}
            case "large images":
                message = {"role": "user", "content": "x" * 1000, "images": [bytes(40 << 20)] * 2}
                return [message], 0.5, False, False, {}
            case "leaves one":
                left = os.fork() or _sleep_apart()
                (self._folder / "started").write_text(f"{os.getpid()} {left}")
            case "hangs" | "starts another":
                child = subprocess.Popen(["sleep", "600"])
                (self._folder / "started").write_text(f"{os.getpid()} {child.pid}")
                if self._how == "hangs":
                    time.sleep(600)
        return f"{action}?", np.float32(0.25), np.bool_(True), False, {"metrics": {"success": np.float64(1)}}

    def close(self) -> None:
        (self._folder / "closed").touch()
        if self._how == "close hangs":
            time.sleep(600)


def __getattr__(name: str) -> Any:
    """`leaves` is no class."""
    if name == "leaves":
        raise SystemExit(3)
    raise AttributeError(name)
