"""Measure this process's peak memory in each phase of a step, and return unused memory to the system between phases.

On a GPU this is the peak of memory that PyTorch's allocator has allocated, else the peak of resident memory (VmHWM,
which Linux resets through /proc/self/clear_refs).
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path

import torch

from hpcrl.messaging.messages import (
    AbortSamples,
    Admit,
    DecodeChunk,
    Logprobs,
    Teach,
    TrainCritic,
    TrainStep,
    UpdateWeights,
    Values,
)
from hpcrl.metrics.stats import Stats, scalar

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5)
PHASES: dict[type, str] = {
    Logprobs: "train",
    Teach: "teacher",
    TrainStep: "train",
    Values: "critic",
    TrainCritic: "critic",
    UpdateWeights: "publish",
    Admit: "generate",
    DecodeChunk: "generate",
    AbortSamples: "generate",
}
"""Command -> its phase; the reference's log-probs are a separate phase."""


class Peaks:
    """Peak memory per phase. A phase's commands follow each other, so a peak is read only after them or by take()."""

    def __init__(self) -> None:
        self._phase = ""
        self._peaks: dict[str, int] = {}

    def enter(self, command: object) -> None:
        """Called before each command; a command without a phase belongs to the current phase."""
        phase = PHASES.get(type(command), self._phase)
        if isinstance(command, Logprobs) and command.role == "reference":
            phase = "reference"
        if phase != self._phase:
            self._read()
            trim_heap()
            take_peak()
            self._phase = phase

    def take(self) -> Stats:
        """Peaks since the last call: `system/<phase>/peak_gib`, merged by maximum."""
        self._read()
        peaks, self._peaks = self._peaks, {}
        return {f"system/{phase}/peak_gib^": scalar(peak / 2**30) for phase, peak in peaks.items()}

    def _read(self) -> None:
        if self._phase and (peak := take_peak()):
            self._peaks[self._phase] = max(peak, self._peaks.get(self._phase, 0))


def trim_heap() -> None:
    """Return freed memory to the system. glibc keeps freed tensors of up to 32 MiB, which a phase with tensors of other
    sizes may not be able to reuse."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
        trim(0)


def take_peak() -> int:
    """Peak bytes since the last call; 0 if the kernel does not report them."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
        CLEAR_REFS.write_text(RESET_PEAK)
        return int(found[1]) * 1024 if found is not None else 0
    return 0
