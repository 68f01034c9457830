"""Checks a run, prints its plan, then starts it on this machine or submits it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path

from hpcrl.config.abilities import check_installed
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from hpcrl.launch.submission import environment_notes, submit, trial
from hpcrl.run_folder import SLURM
from hpcrl.system.cli import in_shell, show
from hpcrl.system.exit_codes import ExitCode

on_checked = ContextVar[Callable[[Path], None]]("on_checked", default=lambda run_dir: None)
"""What start() calls with the run folder when no check has failed."""


def start(argv: Sequence[str]) -> int:
    """Check the run, print its plan and, unless it is finished, run it to its end; returns the exit code."""
    config, layout, model, run, shown = prepare(argv)
    on_checked.get()(run.run_dir)
    plan = describe(config, layout, model, run, shown)
    text = "".join([plan, "\n", *environment_notes(config, layout)])
    if config.dry_run:
        lacking = [f"note: a start would be refused: {problem.text}" for problem in check_installed(config)]
        show(text)  # before Slurm answers
        show("\n".join([*trial(config, layout), *lacking, "dry_run: nothing was started or written"]))
        return ExitCode.DONE
    print(text, end="", flush=True)
    if run.kind == "finished":
        pipeline = config.pipeline_spec
        further = "" if pipeline.rank0_only or not pipeline.trains else "raise max_steps, or "
        print(f"\nfinished: {run.finished['reason']}; {further}choose another run_name or resume=fresh")
        return ExitCode.DONE
    if config.cluster.name == "slurm":
        (job, *links), cluster = submit(config, layout, run.arguments)
        log = Path(config.run_dir) / SLURM / f"job-{job}.log"
        print(f"\njob {job} is submitted\n  follow  tail -F {shlex.quote(str(log))}")
        print(in_shell(f"  status  python -m hpcrl status {shlex.quote(config.run_dir)}"))
        there = f"--clusters={cluster} " if cluster else ""
        print(f"  stop    scancel {there}{' '.join(map(str, [job, *links]))}")
        if links:
            print(f"  chain   {', '.join(map(str, links))} continue after it")
        return ExitCode.DONE
    from hpcrl.run import launch_local  # not needed for a dry run

    return launch_local(config, plan, run.arguments)
