"""Hours and energy of a run, over all of its attempts and jobs, and what they were used for.

    python -m hpcrl cost RUN                # for people
    python -m hpcrl cost RUN --json         # for programs; null is unknown

Prints node-hours, GPU-hours and core-hours of each attempt and job, and the energy that Slurm has accounted; the steps
that a kill cost; and the GPU-hours by phase and role (hours of ranks in a run without GPUs). Times are those of Slurm's
accounting (sacct), where it has them, else those between the begin and the end of attempts. It works during the run and
after it, without Slurm and with damaged files, and writes nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from hpcrl.commands.report import state_in_words
from hpcrl.commands.status import find_folder
from hpcrl.report.hours_text import as_json, in_full
from hpcrl.report.role_hours import hours_split
from hpcrl.report.run_files import RunFiles
from hpcrl.report.run_hours import accounting_of, run_hours
from hpcrl.system.cli import ArgumentParser, show
from hpcrl.system.exit_codes import ExitCode


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 on bad input."""
    parser = ArgumentParser("hpcrl cost", __doc__ or "")
    parser.add_argument("run", metavar="RUN", help="a run's folder, its name in runs/, or a job")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        arguments = parser.parse_args(argv)
        folder = find_folder(arguments.run)
        run = RunFiles(folder, state_in_words(folder))
    except (ValueError, OSError) as error:
        print(f"hpcrl cost: {' '.join(str(error).split())} (see --help)", file=sys.stderr)
        return ExitCode.BAD_INPUT
    run.accounting = accounting_of(run)
    hours = run_hours(run)
    split = hours_split(run, hours)
    if arguments.json:
        show(json.dumps({"run": str(run.path), "state": run.state, **as_json(hours, split)}))
    else:
        lines = [f"run       {run.path}: {run.state or 'never started'}", *in_full(hours, split)]
        show("\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines))
    for problem in run.problems:
        print(f"hpcrl: {run.path}: {problem}", file=sys.stderr)
    return ExitCode.DONE
