"""The page of a long run: the first time, again after new rows, and the list of runs.

    python -m tests.bench.report [--steps 58000]

Seconds of CPU, and memory above that of the imported program, for a run with 100 metrics in each step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcrl.commands.report import state_in_words
from hpcrl.report.live import LivePages
from tests.bench.machine import tell
from tests.report.synthetic import row, write_run

MB = 1e6


def resident_mb(peak: bool = False) -> float:
    """Memory of this process, now or at most since its start."""
    name = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1e3


def measured(work: Callable[[], str]) -> tuple[str, float]:
    """The result and its CPU seconds, of all threads."""
    began = time.process_time()
    return work(), round(time.process_time() - began, 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=58_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        metrics = write_run(Path(folder) / "long", steps) / "metrics.jsonl"
        pages = LivePages(Path(folder), state_in_words, deadline_s=3600)
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is that of writing the run
        before = resident_mb()
        report: dict[str, Any] = {"bench": "report", "file_mb": round(metrics.stat().st_size / MB, 1)}
        text, report["page_cpu_s"] = measured(lambda: pages.report("long"))
        report["page_mb"] = round(len(text) / MB, 2)
        report["more_memory_mb"] = round(resident_mb(peak=True) - before)
        with metrics.open("a") as file:
            file.writelines(json.dumps(row(steps + number)) + "\n" for number in range(1, 11))
        _, report["again_cpu_s"] = measured(lambda: pages.report("long"))
        _, report["list_cpu_s"] = measured(pages.index)
    tell(report)


if __name__ == "__main__":
    main()
