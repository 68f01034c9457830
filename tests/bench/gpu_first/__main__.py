"""The first half hour of hpcrl on a GPU: everything that can be learnt there, in the order in which it teaches most.

    make gpu-first
    python -m tests.bench.gpu_first [--only STEP ...] [--from STEP] [--minutes N] [--report FOLDER]
    python -m tests.bench.gpu_first --device cpu --tiny     # a rehearsal on a CPU: no rate means anything

Each step runs in processes of its own with a time limit, and none stops the next: a failure, a crash or a hang is told
with its stack, and what is missing (a second GPU, vLLM) with its name. FOLDER/report.txt is a page to read; report.json
has the same, with whole stacks, for programs. Both are written anew after each step, and logs are in a folder for each
step. A start with --only or --from adds to the report that is there; a step that is not run keeps its earlier outcome.
The code is 1 if a step failed or hung, 2 if none ran, and 130 after Ctrl-C.

steps, with their time limits:
"""

from __future__ import annotations

import argparse
import math
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.gpu.common import no_gpu
from tests.bench.gpu_first.report import Report, tally
from tests.bench.gpu_first.running import ROOT, Outcome, missing, run_step
from tests.bench.gpu_first.steps import STEPS, Setting, Step

MIN_SHARE = 0.5
"""Of a step's time limit: with less time left it is not begun."""


def run_all(names: Sequence[str], setting: Setting, folder: Path, seconds: float, steps: Mapping[str, Step]) -> int:
    """Run the steps and report them in the folder; returns the exit code. seconds: of all. Errors: see Report."""
    started, report, statuses, code = time.monotonic(), Report(folder, setting, steps), set(), 0
    for number, name in enumerate(names, 1):
        step, left_s = steps[name], seconds - (time.monotonic() - started)
        limit_s, left = min(step.limit_s, left_s), f"{max(left_s, 0):.0f} s left" if math.isfinite(left_s) else ""
        short = f"{left} (--minutes)" if left_s < MIN_SHARE * step.limit_s else ""
        print(
            f"{number} of {len(names)}  {name}: {step.teaches} (up to {step.limit_s:.0f} s)  {left}".rstrip(),
            flush=True,
        )
        why = missing(step, setting) or short
        try:
            outcome = Outcome(name, "not run", error=why) if why else run_step(name, step, setting, folder, limit_s)
        except (KeyboardInterrupt, SystemExit) as end:
            outcome = Outcome(name, "interrupted")
            code = end.code if isinstance(end, SystemExit) else 128 + signal.SIGINT
        report.add(outcome)
        statuses.add(outcome.status)
        expected = f", {found} figures as expected" if (found := tally(outcome)) else ""
        print(f"    {outcome.status} {outcome.error or f'in {outcome.seconds:.0f} s'}{expected}", flush=True)
        if code:
            break
    print(f"\n{(folder / 'report.txt').read_text()}\nreport {folder / 'report.txt'}, {folder / 'report.json'}")
    return code or (1 if statuses & {"failed", "hung"} else 0 if "ok" in statuses else 2)


def main(argv: Sequence[str] | None = None) -> int:
    told = "\n".join(f"  {name:<14} {step.limit_s:4.0f} s  {step.teaches}" for name, step in STEPS.items())
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "gpu-first", description=__doc__ + told, formatter_class=as_written, usage=argparse.SUPPRESS
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models and sizes for a CPU")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="STEP", help="these alone, in the table's order")
    parser.add_argument("--from", dest="first", choices=STEPS, metavar="STEP", help="this one and those after it")
    parser.add_argument(
        "--minutes", type=_positive, default=math.inf, metavar="N", help="of all steps; what does not fit is not run"
    )
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="default runs/gpu_first, runs/gpu_first_tiny")
    words = parser.parse_args(argv)
    if words.device == "cpu" and not words.tiny:
        parser.error("--device cpu needs --tiny: the full sizes are for a GPU")
    names = list(STEPS)[list(STEPS).index(words.first) if words.first else 0 :]
    names = [name for name in names if words.only is None or name in words.only]
    if not names:
        parser.error(f"--only {' '.join(words.only)} and --from {words.first} leave no step")
    import torch

    if words.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu-first: {no_gpu()}; --device cpu --tiny rehearses the same on the CPU")
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # a job that ends: the step's processes too
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # of what is aborted
    setting = Setting(words.device, words.tiny, torch.cuda.device_count())
    folder = words.report or ROOT / "runs" / ("gpu_first_tiny" if words.tiny else "gpu_first")
    try:
        return run_all(names, setting, folder.resolve(), 60 * words.minutes, STEPS)
    except (OSError, ValueError) as error:
        parser.error(f"--report: {error}; name another folder")


def _positive(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text}: more than 0 is needed")
    return number


if __name__ == "__main__":
    raise SystemExit(main())
