"""What happened in a run, and why, as one HTML file that opens without a server and without network.

    python -m hpcrl report RUN [RUN ...] [--out FILE.html|FOLDER]

RUN is a run's folder, its name in runs/, or a job. The report of one run is RUN/report.html, unless --out says
otherwise. Several runs need --out: in a FILE.html they are drawn over each other; a FOLDER gets this page
(together.html), a page for each run, and an index (index.html). The command only reads the run folder, also while the
run writes to it; repeat it for newer steps.

examples
  python -m hpcrl report runs/demo
      writes runs/demo/report.html: copy it to your machine, and open it in a browser
  python -m hpcrl report demo demo-2 --out compared.html
      two runs of runs/ over each other
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpcrl.cluster import slurm
from hpcrl.commands.status import RunFolder, find_folder, find_job, state
from hpcrl.config import ConfigError
from hpcrl.report.index import entry, index
from hpcrl.report.page import page
from hpcrl.report.run_files import RunFiles
from hpcrl.report.run_hours import accounting_of
from hpcrl.system.cli import ArgumentParser, show, use_utf8
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import write_durably

REPORT = "report.html"
SLOW_S = 5.0
"""Seconds of writing from which the command says how long it took."""


def state_in_words(folder: Path) -> str:
    """A run's state, for which Slurm is queried unless the run is finished; `unknown` with the reason if it is not
    known."""
    known = RunFolder(folder)
    try:
        return state(known, None if known.finished else find_job(known))
    except (ConfigError, OSError, slurm.SlurmError) as error:
        return f"unknown: {' '.join(str(error).split())}"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, text.encode(), writer=str(os.getpid()))
    except OSError as error:
        remedy = "choose another place with --out FILE.html"
        raise ValueError(f"{path} cannot be written: {error.strerror or error}; {remedy}") from error
    show(str(path))


def _write_folder(runs: Sequence[RunFiles], folder: Path) -> None:
    entries, names = [], set[str]()
    for run in runs:
        name = run.name
        while name in (*names, "index", "together"):
            name += "-2"
        names.add(name)
        _write(folder / f"{name}.html", page([run]))
        entries.append(entry(run, f"{name}.html"))
    together = "together.html" if len(runs) > 1 else ""
    if together:
        _write(folder / together, page(runs))
    _write(folder / "index.html", index("Runs", entries, above=together))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code."""
    parser = ArgumentParser("hpcrl report", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, its name in runs/, or a job")
    parser.add_argument("--out", metavar="FILE.html|FOLDER", help="where to write; default: RUN/report.html")
    began = time.monotonic()
    try:
        arguments = parser.parse_args(argv)
        folders = list(dict.fromkeys(map(find_folder, arguments.runs)))
        if len(folders) > 1 and arguments.out is None:
            raise ValueError(f"{len(folders)} runs in one report need a place for it: --out FILE.html or --out FOLDER")
        runs = [RunFiles(folder, state_in_words(folder)) for folder in folders]
        for run in runs:
            run.accounting = accounting_of(run)
        out = runs[0].path / REPORT if arguments.out is None else Path(arguments.out)
        if out.suffix == ".html" and not out.is_dir():
            _write(out, page(runs))
        else:
            _write_folder(runs, out)
    except (ValueError, OSError) as error:
        print(f"hpcrl: {error} (see --help)", file=sys.stderr)
        return ExitCode.BAD_INPUT
    for run in runs:
        for problem in run.problems:
            print(f"hpcrl: {run.path}: {problem}", file=sys.stderr)
    if (took_s := time.monotonic() - began) > SLOW_S:
        print(f"hpcrl: written in {took_s:.0f} s", file=sys.stderr)
    return ExitCode.DONE


if __name__ == "__main__":
    use_utf8()
    sys.exit(main())
