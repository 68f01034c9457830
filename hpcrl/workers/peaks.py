"""The peak memory of this process in each phase of a step, as metrics; between two phases, unused memory is given back.

On a GPU the most that PyTorch's allocator had handed out, else the most that was resident (VmHWM, which Linux resets
through /proc/self/clear_refs).
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
    TrainStep: "train",
    Values: "critic",
    TrainCritic: "critic",
    UpdateWeights: "publish",
    Admit: "generate",
    DecodeChunk: "generate",
    AbortSamples: "generate",
}
"""Command -> the phase it belongs to; log-probs of the reference are a phase of their own."""


class Peaks:
    """Commands of a phase follow each other, so memory is read only between two phases and for a report."""

    def __init__(self) -> None:
        self._phase = ""
        self._peaks: dict[str, int] = {}

    def enter(self, command: object) -> None:
        """The command is executed next; one without a phase belongs to the phase before it."""
        phase = PHASES.get(type(command), self._phase)
        if isinstance(command, Logprobs) and command.role == "reference":
            phase = "reference"
        if phase != self._phase:
            self._read()
            trim_heap()
            take_peak()
            self._phase = phase

    def take(self) -> Stats:
        """Peaks since the last call: `system/<phase>/peak_gib`, of which the largest counts."""
        self._read()
        peaks, self._peaks = self._peaks, {}
        return {f"system/{phase}/peak_gib^": scalar(peak / 2**30) for phase, peak in peaks.items()}

    def _read(self) -> None:
        if self._phase and (peak := take_peak()):
            self._peaks[self._phase] = max(peak, self._peaks.get(self._phase, 0))


def trim_heap() -> None:
    """Return freed memory to the system. glibc keeps freed tensors of up to 32 MiB, for which a phase with tensors of
    other sizes may have no use."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
        trim(0)


def take_peak() -> int:
    """Bytes of the peak since the last call; 0 where the kernel does not tell."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
        CLEAR_REFS.write_text(RESET_PEAK)
        return int(found[1]) * 1024 if found is not None else 0
    return 0
