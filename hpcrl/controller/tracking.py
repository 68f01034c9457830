"""Start trackers for a running or finished run."""

from __future__ import annotations

import functools
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.part_names import section_name
from hpcrl.metrics.trackers.thread import FOLDER, TrackerThread
from hpcrl.metrics.trackers.thread import run_id as id_of
from hpcrl.metrics.trackers.tracker import TrackedRun, Tracker
from hpcrl.run_folder import PLAN
from hpcrl.spec.tables import TRACKERS


def start_trackers(config: Config, run_dir: Path, resume_step: int) -> list[TrackerThread]:
    """A thread for each configured tracker. `resume_step` is the restored checkpoint's step, -1 without one."""
    threads, tracked = [], id_of(run_dir)
    for name in config.trackers:
        make = functools.partial(make_tracker, config, run_dir, name, tracked)
        step_file, spec, timeout_s = last_step_file(config, run_dir, name), TRACKERS[name], config.tracking.timeout_s
        threads.append(TrackerThread(name, make, step_file, resume_step, spec.rewinds, timeout_s, live=spec.live))
    return threads


def make_tracker(config: Config, run_dir: Path, name: str, run_id: str, first_step: int) -> Tracker:
    """Create the run's tracker with this id; may take long, hang or raise anything."""
    run = TrackedRun(
        name=config.run_name,
        project=config.tracking.project,
        id=run_id,
        run_dir=run_dir,
        folder=folder_of(config, run_dir, name),
        first_step=first_step,
        online=config.tracking.online,
        config=config.model_dump(mode="json"),
        plan=plan.read_text() if (plan := run_dir / PLAN).is_file() else "",
    )
    spec = TRACKERS[name]
    tracker: Tracker = spec.load()(run, getattr(config.tracking, section_name(name, spec), None))
    return tracker


def folder_of(config: Config, run_dir: Path, name: str) -> Path:
    """A tracker's folder; online and offline tracking have separate folders, each with its own last step."""
    return run_dir / FOLDER / (name.replace(":", "_") + ("_online" if config.tracking.online else ""))


def last_step_file(config: Config, run_dir: Path, name: str) -> Path:
    """The file with a tracker's last logged step."""
    folder = folder_of(config, run_dir, name)
    return folder.with_name(f"{folder.name}.told")
