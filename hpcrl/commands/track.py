"""Upload the metrics of a run to a tracker, from a machine with network access such as the login node.

python -m hpcrl track RUN TRACKER [URI]          every step of metrics.jsonl that the tracker does not have,
                                                 the validation completions and the plot

Weights & Biases and SwanLab find their API keys as usual.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.commands.status import find_run
from hpcrl.config import Config, ConfigError, parse
from hpcrl.config.part_names import section_name
from hpcrl.controller.examples import TABLE, as_table, read_examples
from hpcrl.controller.tracking import last_step_file, make_tracker
from hpcrl.metrics.log import read_metrics
from hpcrl.metrics.trackers.thread import TrackerThread, log_missed, run_id
from hpcrl.metrics.trackers.tracker import Tracker
from hpcrl.run_folder import stored_config
from hpcrl.spec.extras import install
from hpcrl.spec.tables import TRACKERS
from hpcrl.system.cli import ArgumentParser, use_utf8
from hpcrl.system.exit_codes import ExitCode


def main(argv: Sequence[str] | None = None) -> int:
    """Upload the run; returns the exit code."""
    parser = ArgumentParser("hpcrl track", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run's folder, its name in runs/, or a job")
    names = [name for name, spec in TRACKERS.items() if not spec.live]
    parser.add_argument("name", metavar="TRACKER", help=f"{', '.join(names)}, or module:SPEC")
    parser.add_argument("uri", nargs="?", metavar="URI", help="address of the server, for mlflow")
    try:
        arguments = parser.parse_args(argv)
        run_dir, name = find_run(arguments.run), arguments.name
        config = _config(run_dir, name, arguments.uri)
    except ValueError as error:
        print(f"{error} (see --help)", file=sys.stderr)
        return ExitCode.BAD_INPUT
    failed: list[str] = []
    tracker = TrackerThread(
        name,
        functools.partial(make_tracker, config, run_dir, name, run_id(run_dir)),
        last_step_file(config, run_dir, name),
        resume_step=-1,
        rewinds=False,
        timeout_s=config.tracking.timeout_s,
        warn=failed.append,
    )
    rows = read_metrics(run_dir)
    log_missed([tracker], rows)
    for step, examples in read_examples(run_dir).items():
        tracker.put(functools.partial(_put_table, step, as_table(step, examples)))
    if (plot := run_dir / "plot.png").is_file():
        tracker.put(lambda tracker: tracker.image("plot", plot))
    tracker.drain()  # without a limit on the total time
    tracker.close(within_s=config.tracking.timeout_s)
    if failed:
        print(f"hpcrl: {failed[0]}", file=sys.stderr)
        return ExitCode.FAILED
    print(f"{name} has the {len(rows)} rows of {run_dir}")
    return ExitCode.DONE


def _put_table(step: int, rows: list[dict[str, Any]], tracker: Tracker) -> None:
    if rows:
        tracker.table(TABLE, step, rows)


def _config(run_dir: Path, name: str, uri: str | None) -> Config:
    """The configuration with this tracker and network access. ConfigError for an unknown or uninstalled tracker."""
    spec = TRACKERS[name]
    if lacking := spec.missing_packages():
        raise ConfigError([f"{name} is not installed; {install(lacking)}"])
    if spec.live:
        raise ConfigError([f"{name} has only present values; set trackers=[...,{name}] for a run"])
    data = stored_config(run_dir).model_dump(mode="json")
    data["trackers"], data["tracking"]["online"] = [name], True
    if uri:
        if spec.section is None or "uri" not in spec.section.model_fields:
            raise ConfigError([f"{uri}: {name} takes no address"])
        data["tracking"].setdefault(section_name(name, spec), {})["uri"] = uri
    config = parse(data)
    if problems := [problem.text for problem in spec.check(config)]:
        raise ConfigError(problems)
    return config


if __name__ == "__main__":
    use_utf8()
    sys.exit(main())
