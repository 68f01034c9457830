"""Upload the metrics of a run to a tracker, from a machine with network access such as the login node.

python -m hpcrl.track RUN_DIR TRACKER [URI]      every step of metrics.jsonl that the tracker was not told before

URI is the address of the server, for mlflow. Weights & Biases and SwanLab read their keys as usual.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.cli import in_shell
from hpcrl.config import Config, ConfigError, parse
from hpcrl.exitcodes import ExitCode
from hpcrl.metrics.log import read_metrics
from hpcrl.metrics.trackers.telling import Telling, run_id, tell_all
from hpcrl.rundir import stored_config
from hpcrl.runtime.tracking import last_step_file, make_tracker
from hpcrl.spec.extras import install
from hpcrl.spec.tables import TRACKERS


def main(argv: Sequence[str] | None = None) -> int:
    """Tell the run; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["-h"], ["--help"]):
        print(in_shell(__doc__ or ""), end="")
        return ExitCode.DONE
    try:
        run_dir, name, config = _read(words)
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return ExitCode.BAD_INPUT
    failed: list[str] = []
    tracker = Telling(
        name,
        functools.partial(make_tracker, config, run_dir, name, run_id(run_dir)),
        last_step_file(config, run_dir, name),
        resume_step=-1,
        rewinds=False,
        timeout_s=config.tracking.timeout_s,
        warn=failed.append,
    )
    rows = read_metrics(run_dir)
    tell_all([tracker], rows)
    if (plot := run_dir / "plot.png").is_file():
        tracker.put(lambda tracker: tracker.image("plot", plot))
    tracker.drain()  # however long all of it takes
    tracker.close(within_s=config.tracking.timeout_s)
    if failed:
        print(f"hpcrl: {failed[0]}", file=sys.stderr)
        return ExitCode.FAILED
    print(f"{name} has the {len(rows)} rows of {run_dir}")
    return ExitCode.DONE


def _read(words: Sequence[str]) -> tuple[Path, str, Config]:
    """The run folder, the tracker and the configuration with the network. ConfigError says what is wrong."""
    if len(words) not in (2, 3):
        raise ConfigError([in_shell("usage: python -m hpcrl.track RUN_DIR TRACKER [URI]")])
    run_dir, name, *uri = words
    if name not in list(TRACKERS):
        raise ConfigError([f"there is no tracker {name}; there are {', '.join(TRACKERS)}"])
    if lacking := TRACKERS[name].lacking():
        raise ConfigError([f"{name} is not installed; {install(lacking)}"])
    data = stored_config(Path(run_dir)).model_dump(mode="json")
    data["trackers"], data["tracking"]["online"] = [name], True
    if uri:
        if "uri" not in data["tracking"].get(name, {}):
            raise ConfigError([f"{uri[0]}: {name} takes no address"])
        data["tracking"][name]["uri"] = uri[0]
    config = parse(data)
    if problems := [problem.text for problem in TRACKERS[name].check(config)]:
        raise ConfigError(problems)
    return Path(run_dir), name, config


if __name__ == "__main__":
    sys.exit(main())
