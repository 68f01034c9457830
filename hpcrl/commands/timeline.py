"""Show what the ranks of a run did in a step, and what they waited for.

    python -m hpcrl timeline RUN                                  # the newest step
    python -m hpcrl timeline RUN --step 12
    python -m hpcrl timeline RUN --step 12 --chrome-trace step12.json

Prints for each role the shares of the step in which its ranks worked, and in which they waited, with the cause; then
how long samples took. --chrome-trace writes all events to a new file, which ui.perfetto.dev and chrome://tracing open.
A run keeps the newest steps (timeline.keep_steps).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrl.commands.status import find_folder
from hpcrl.metrics.duration import duration
from hpcrl.system.cli import ArgumentParser, show
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import write_durably
from hpcrl.timeline.chrome_trace import chrome_trace
from hpcrl.timeline.step_file import SampleRow, StepTimeline, path_of, read_step, recorded_steps
from hpcrl.timeline.waiting import RoleShares, role_shares

MIN_SHARE = 0.005
"""Smaller shares of a step are added up as `less than 0.5 % each`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 on bad input."""
    try:
        arguments = _parser().parse_args(argv)
        step = _step_of(find_folder(arguments.run), arguments.step)
        if arguments.chrome_trace is not None:
            _write(step, arguments.chrome_trace)
    except (ValueError, OSError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"hpcrl timeline: {' '.join(text.split())} (see --help)", file=sys.stderr)
        return ExitCode.BAD_INPUT
    show("\n".join("".join(c if c.isprintable() else "?" for c in line) for line in _lines(step)))
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser("hpcrl timeline", __doc__ or "")
    parser.add_argument("run", metavar="RUN", help="a run's folder, its name in runs/, or a job")
    parser.add_argument("--step", type=int, metavar="N", help="the step; default: the newest")
    parser.add_argument("--chrome-trace", type=Path, metavar="FILE", help="write the step's events to this new file")
    return parser


def _step_of(run: Path, step: int | None) -> StepTimeline:
    steps = recorded_steps(run)
    if not steps:
        why = "no step has ended yet, timeline.enabled was false, or the run only evaluates"
        raise ValueError(f"{run} has no timelines: {why}")
    if step is not None and step not in steps:
        kept = ", ".join(map(str, steps[-8:]))
        raise ValueError(f"--step {step}: {run} has no timeline of this step; the newest are {kept}")
    return read_step(path_of(run, steps[-1] if step is None else step))


def _write(step: StepTimeline, path: Path) -> None:
    if path.exists():
        raise ValueError(f"--chrome-trace: {path} exists, and nothing is overwritten; name another file or remove it")
    write_durably(path, json.dumps(chrome_trace(step), separators=(",", ":")).encode())


def _lines(step: StepTimeline) -> Iterator[str]:
    header = step.header
    ended = "" if header.complete else ", in which the run ended"
    long = f" ({duration(header.seconds)})" if header.seconds >= 60 else ""
    yield f"step {header.step}: {header.seconds:.3g} s{long} on {len(header.ranks)} ranks{ended}"
    for shares in role_shares(step):
        yield ""
        yield f"{', '.join(shares.roles)}: {shares.num_ranks} rank{'s' * (shares.num_ranks != 1)}"
        yield from _shares(shares, header.seconds)
    if step.samples:
        yield ""
        yield from _samples(step.samples)
    if omitted := sum(header.omitted.values()):
        yield f"{omitted} events beyond the limits of a step are not in this timeline"
    if step.damaged:
        yield f"{step.damaged} damaged lines were left out"


def _shares(shares: RoleShares, seconds: float) -> Iterator[str]:
    for told, found in (("", shares.busy), ("waited for ", shares.waiting)):
        small = 0.0
        for what, spent in found.items():
            share = spent / max(seconds, 1e-9)
            if share >= MIN_SHARE:
                yield f"  {share:6.1%}  {told}{what}"
            else:
                small += share
        if small >= MIN_SHARE:
            yield f"  {small:6.1%}  {told}something, less than {MIN_SHARE:.1%} each"


def _samples(samples: Sequence[SampleRow]) -> Iterator[str]:
    fates = Counter(sample.fate for sample in samples)
    yield f"{len(samples)} samples: " + ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
    trained = [sample for sample in samples if sample.fate == "trained"]
    for name, of in (
        ("generation", [(sample.start, sample.end) for sample in trained]),
        ("score", [(sample.end, sample.scored) for sample in trained]),
        ("wait until training", [(sample.scored, sample.done) for sample in trained]),
    ):
        spent = [(end - start) / 1e6 for start, end in of if start is not None and end is not None]
        if spent:
            low, middle, high = min(spent), statistics.median(spent), max(spent)
            yield f"  {name}: median {middle:.3g} s, from {low:.3g} to {high:.3g} s"
    if lags := [sample.lag for sample in trained if sample.lag is not None]:
        yield f"  lag: mean {statistics.fmean(lags):.2f}, at most {max(lags)} weight versions"
