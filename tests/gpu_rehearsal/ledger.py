"""What makes the host wait for the device, or copies between them, by the function of hpcrl that asks for it."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import hpcrl

ROOT = str(Path(hpcrl.__file__).parent) + "/"
COPIES = ROOT + "rollout/device_copies.py"
"""Copies for others."""


class Ledger:
    """sections: name -> (place, what) -> times. Nothing is counted outside a section, or without a frame of hpcrl."""

    def __init__(self) -> None:
        self.sections: dict[str, Counter[tuple[str, str]]] = {}
        self._open: Counter[tuple[str, str]] | None = None

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._open = self.sections.setdefault(name, Counter())
        try:
            yield
        finally:
            self._open = None

    def note(self, what: str) -> None:
        if self._open is not None and (place := whose()) is not None:
            self._open[place, what] += 1


def whose() -> str | None:
    """The innermost function of hpcrl that is running, as path:name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(ROOT) and code.co_filename != COPIES:
            return f"{code.co_filename.removeprefix(ROOT)}:{code.co_qualname.replace('.<locals>', '')}"
        frame = frame.f_back
    return None
