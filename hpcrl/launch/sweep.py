"""Sweeps: `python -m hpcrl.launch -m trainer.lr=1e-4,5e-4 seed=0,1` starts four runs, each with its own folder.

Values use Hydra's syntax (a,b  choice(a,b)  range(0,3)). All points are checked before the first starts. On Slurm every
point is a job, and all are queued at once; on one machine, points run one after the other. The command ends when the
last point has ended; run again, it resumes unfinished points.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcrl.commands.status import RunFolder
from hpcrl.config import ConfigError, read
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from hpcrl.launch.start import start
from hpcrl.launch.submission import environment_notes
from hpcrl.metrics.progress import SHOWN
from hpcrl.run_folder import CONFIG
from hpcrl.spec.extras import install
from hpcrl.system.exit_codes import ExitCode

MAX_NAME = 200
"""Maximum bytes of a point's name; file systems allow 255 for a folder."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep. `name` has its swept values, such as seed-0_trainer.lr-0.0001, and also names its folder."""

    name: str
    arguments: list[str]


def sweep(argv: Sequence[str]) -> int:
    """Run every point of the sweep described by the arguments (without -m); returns the first exit code that is not 0,
    else 0."""
    points = expand(argv)
    prepared, problems = [], []
    for point in points:
        try:
            prepared.append(prepare(point.arguments))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    print(describe(*prepared[0]))
    print("".join(environment_notes(*prepared[0][:2])), end="")
    folders = [Path(config.run_dir) for config, *_ in prepared]
    print("\n".join([f"\nin total {len(points)} runs:", *(f"  {folder}" for folder in folders)]), flush=True)
    config = prepared[0][0]
    if config.dry_run:
        print("\ndry_run: nothing was started or written")
        return ExitCode.DONE
    ends = _on_slurm(points, folders) if config.cluster.name == "slurm" else _here(points)
    print("\n" + "\n".join(_table(points, folders, ends)))
    return next((code for code, _ in ends if code), ExitCode.DONE)


def expand(argv: Sequence[str]) -> list[Point]:
    """The points, each with its own run_name and run_dir among the arguments. ConfigError if that is impossible."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, axes = OverridesParser.create(), []
    for word in argv:
        axis = [(word, "")]
        with suppress(HydraException):  # composing reports the error
            override = parser.parse_override(word)
            if override.is_sweep_override():
                if not override.is_discrete_sweep():
                    raise ConfigError([f"{word}: an interval has no list of values; write range(...) or a,b"])
                key = override.get_key_element()
                axis = [(f"{key}={value}", _name(key, value)) for value in override.sweep_string_iterator()]
        axes.append(axis)
    points = []
    for choice in itertools.product(*axes):
        arguments, name = [word for word, _ in choice], "_".join(sorted(name for _, name in choice if name))
        if not name:
            raise ConfigError(["-m: no key has several values; write key=a,b, or leave -m out"])
        points.append(_place(name, arguments))
    if len({point.name for point in points}) < len(points):
        raise ConfigError(["-m: two runs of the sweep would have the same name; remove duplicate values"])
    return points


def _name(key: str, value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", f"{key.lstrip('+')}-{value}").strip("-")


def _place(name: str, arguments: list[str]) -> Point:
    """The point with its folder, inside the folder that the arguments would give a single run."""
    if len(name) > MAX_NAME:
        raise ConfigError([f"-m: a folder's name would have {len(name)} characters ({name[:40]}...); sweep fewer keys"])
    config = read(arguments).config
    if config is None:
        return Point(name, arguments)  # preparing reports the error
    if (Path(config.run_dir) / CONFIG).exists():
        raise ConfigError([f"run_dir: {config.run_dir} is a single run; give the sweep another run_name"])
    return Point(name, [*arguments, f"run_name={config.run_name}_{name}", f"run_dir={config.run_dir}/{name}"])


def _here(points: Sequence[Point]) -> list[tuple[int, str]]:
    """Run the points one after the other, until the user stops one; returns their exit codes and messages."""
    ends: list[tuple[int, str]] = []
    for point in points:
        print(f"\n== {point.name}", flush=True)
        code = start(point.arguments)
        ends.append((code, ExitCode(code).name.lower()))
        if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            break
    return ends + [(ExitCode.INTERRUPTED, "not started")] * (len(points) - len(ends))


def _on_slurm(points: Sequence[Point], folders: Sequence[Path]) -> list[tuple[int, str]]:
    """Submit all points and wait until Slurm has ended all; returns their exit codes and messages."""
    try:
        from submitit.core.plugins import get_executors
        from submitit.core.utils import UncompletedJobError

        from hpcrl.launch.executor import RunJob
        from hpcrl.launch.sweep_launcher import SweepLauncher
    except ImportError as error:
        raise ConfigError([f"-m on Slurm: {error.name} is not installed; {install(['slurm'])}"]) from error
    if "hpcrl" not in get_executors():
        raise ConfigError(
            ["-m: hpcrl was installed without its executor; remove hpcrl.egg-info if it exists, then run make setup"]
        )
    print(
        "\nall runs are submitted to Slurm; this command waits for them, and Ctrl-C leaves them in the queue",
        flush=True,
    )
    with suppress(UncompletedJobError):  # raised for the first failure; the loop below waits for the other runs
        SweepLauncher(Path(os.path.commonpath(folders))).launch([point.arguments for point in points], 0)
    ends: list[tuple[int, str]] = []
    for folder in folders:
        job = RunJob.of_run(folder)
        failure = job.exception()
        if failure is not None:
            print(f"hpcrl: {failure}", file=sys.stderr, flush=True)
        ends.append((ExitCode.DONE if failure is None else ExitCode.FAILED, f"job {job.job_id} {job.state.lower()}"))
    return ends


def _table(points: Sequence[Point], folders: Sequence[Path], ends: Sequence[tuple[int, str]]) -> Iterator[str]:
    width = max(len(point.name) for point in points)
    for point, folder, (_, how) in zip(points, folders, ends, strict=True):
        run = RunFolder(folder)
        scores = [f"{name} {form.format(found[1])}" for key, name, form in SHOWN if (found := run.newest(key))]
        yield f"{point.name:<{width}}  {how:<20}  {'  '.join([f'step {run.step}', *scores])}"
