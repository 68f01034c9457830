"""Starts the trackers of a run, or of one that is over."""

from __future__ import annotations

import functools
from pathlib import Path

from hpcrl.config import Config
from hpcrl.metrics.trackers.base import TrackedRun, Tracker
from hpcrl.metrics.trackers.telling import FOLDER, Telling, run_id
from hpcrl.spec.tables import TRACKERS


def start_trackers(config: Config, run_dir: Path, resume_step: int) -> list[Telling]:
    """A thread for each tracker of the configuration. resume_step: the step of the checkpoint, -1 without one."""
    tellings, number = [], run_id(run_dir)
    for name in config.trackers:
        make = functools.partial(make_tracker, config, run_dir, name, number)
        told = folder_of(config, run_dir, name).with_suffix(".told")
        tellings.append(Telling(name, make, told, resume_step, TRACKERS[name].rewinds, config.tracking.timeout_s))
    return tellings


def make_tracker(config: Config, run_dir: Path, name: str, number: str, first_step: int) -> Tracker:
    """The tracker of the run with this id; may take long, hang or raise anything."""
    run = TrackedRun(
        name=config.run_name,
        project=config.tracking.project,
        id=number,
        run_dir=run_dir,
        folder=folder_of(config, run_dir, name),
        first_step=first_step,
        online=config.tracking.online,
        config=config.model_dump(mode="json"),
    )
    tracker: Tracker = TRACKERS[name].load()(run, getattr(config.tracking, name, None))
    return tracker


def folder_of(config: Config, run_dir: Path, name: str) -> Path:
    """The folder of a tracker; another one with the network, so that what one was told is not what the other was."""
    return run_dir / FOLDER / (name.replace(":", "_") + ("_online" if config.tracking.online else ""))
