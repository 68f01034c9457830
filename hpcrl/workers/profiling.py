"""A rank's profile of a step (the section `profile`): a trace of its commands, operators and GPU kernels."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import torch

from hpcrl.config.profiling import ProfileConfig
from hpcrl.messaging.messages import Done, Profile
from hpcrl.system.files import naming, step_name

logger = logging.getLogger(__name__)

MAX_ALLOCATIONS = 1_000_000
"""Number of the last allocations and frees in a snapshot of GPU memory."""


def profile_path(run_dir: Path, step: int, rank: int) -> Path:
    """A rank's trace of a step."""
    return run_dir / "profiles" / step_name(step) / f"rank_{rank:04d}.json.gz"


class Profiling:
    """Starts and stops the profiler at the controller's commands. Between them, span() names a command in the trace."""

    def __init__(self, config: ProfileConfig, run_dir: Path, rank: int):
        self._config, self._run_dir, self._rank = config, run_dir, rank
        self._profiler: Any = None

    def handle(self, command: Profile, seq: int) -> Done:
        """Execute the command. The answer's texts say what could not be profiled or written."""
        if command.begins:
            return Done(seq, texts=self._begin())
        return Done(seq, texts=self._end(command.step))

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Marks a command in the trace, while one is recorded."""
        return contextlib.nullcontext() if self._profiler is None else torch.profiler.record_function(name)

    def _begin(self) -> list[str]:
        has_gpu, lacking = torch.cuda.is_available(), []
        if self._config.memory and has_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
        elif self._config.memory:
            lacking.append("no snapshot of GPU memory: this rank has no GPU")
        if self._config.nsys and has_gpu:
            torch.cuda.profiler.start()
        elif self._config.nsys:
            lacking.append("nothing for nsys to capture: this rank has no GPU")
        else:
            kinds = torch.profiler.ProfilerActivity
            self._profiler = torch.profiler.profile(
                activities=[kinds.CPU, *([kinds.CUDA] if has_gpu else [])], record_shapes=True
            )
            self._profiler.start()
        return lacking

    def _end(self, step: int) -> list[str]:
        path, has_gpu = profile_path(self._run_dir, step, self._rank), torch.cuda.is_available()
        if self._config.nsys and has_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        try:
            with naming(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                if profiler is not None:
                    part = path.with_name(f".{path.name}.part.json.gz")  # torch compresses by the name
                    profiler.export_chrome_trace(str(part))
                    os.replace(part, path)
                if self._config.memory and has_gpu:
                    torch.cuda.memory._dump_snapshot(str(path.with_name(f"rank_{self._rank:04d}.pickle")))
        except OSError as error:  # the run continues without it
            return [f"no profile of step {step}: {error}"]
        finally:
            if self._config.memory and has_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
        return []
