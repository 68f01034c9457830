"""hpcrl.Run: a run folder as an object. Reads the folder only, also while the run writes to it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from hpcrl.checkpoint.commit import first_damage, problem_of
from hpcrl.cluster import slurm
from hpcrl.commands.status import RunFolder, describe, find_job, find_run, last_error, state
from hpcrl.config import ConfigError
from hpcrl.launch.frozen import SUBMITTED_CONFIG
from hpcrl.metrics.evaluated import SUMMARY
from hpcrl.metrics.log import read_metrics
from hpcrl.metrics.responses import FOLDER, evaluated_steps, read_responses, responses_file
from hpcrl.python.failure import RunFailed
from hpcrl.python.series import MetricArrays
from hpcrl.run_folder import (
    CONFIG,
    FACTS,
    OUTCOME,
    OWNERS,
    PLAN,
    SUBMITTED,
    lives_as_job,
    process_lives,
    read_record,
    submitted_jobs,
    world_folder,
)
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import step_name, steps_in

if TYPE_CHECKING:
    from hpcrl.python.stored_samples import StoredSample

ENDED = ("stopped: attempt", "refused", "lost", "never started")
"""How the state of a run begins that does not go on by itself. A job that Slurm has stopped is `stopped: job`."""
SETTLED = 2
"""Looks that must find a run ended: records of other nodes appear late on a shared file system."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint of a run. `problem` says how its files differ from what was committed, empty if they do
    not: always by names and sizes, by content only with verify=True."""

    step: int
    path: Path
    problem: str = ""

    @property
    def valid(self) -> bool:
        """Whether no difference was found."""
        return not self.problem


@dataclass(frozen=True)
class StoredEpisode:
    """An episode of a validation that the run has kept: the `first`, the `best` or the `worst` of its domain."""

    step: int
    domain: str
    kind: str
    path: Path
    """Its text; beside it are the page (.html) and, for grids and images, pictures (.png, .gif)."""

    @property
    def text(self) -> str:
        """A line with score, reward and turns, then the messages."""
        return self.path.read_text(errors="replace")


class RunHandle:
    """A run, by its folder, its name in runs/ or its Slurm job. Every access reads the folder anew.

    ConfigError, a ValueError, if there is no such run. A run that never started is one: it has no metrics, samples or
    checkpoints. Reading imports torch for samples() only.
    """

    def __init__(self, path: str | os.PathLike[str]):
        given = os.fspath(path)
        self.path = (Path(given) if _is_run(Path(given)) else find_run(given)).absolute()

    def __repr__(self) -> str:
        return f"hpcrl.Run({str(self.path)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The complete configuration of the newest attempt, or of the submitted job; empty before. ConfigError if it is
        damaged."""
        values = self._folder.values
        submitted = self.path / SUBMITTED_CONFIG
        if values or not submitted.exists():
            return values
        try:
            loaded = yaml.safe_load(submitted.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError([f"{submitted} cannot be read: {' '.join(str(error).split())}"]) from error
        return dict(loaded) if isinstance(loaded, dict) else {}

    @property
    def state(self) -> str:
        """A word, as `hpcrl status` shows it: queued, requeued, held, starting, running, ending, finished, stopped,
        refused, lost, never started, unknown. Asks Slurm about a job."""
        return self._state().partition(":")[0]

    @property
    def status(self) -> str:
        """The text of `hpcrl status RUN`: state, progress, time left, checkpoints, restarts, errors."""
        return describe(self.path, find_job(self._folder), time.time())

    @property
    def step(self) -> int:
        """The last step with metrics, else of the newest checkpoint; 0 before the first."""
        return int(self._folder.step)

    @property
    def job_id(self) -> int | None:
        """The newest submitted Slurm job, the first of a chain; None for a run on this machine."""
        return next(iter(submitted_jobs(self.path)), None)

    @property
    def metrics(self) -> MetricArrays:
        """The metrics of all steps so far."""
        return MetricArrays(read_metrics(self.path))

    @property
    def hf(self) -> Path:
        """The final model's folder, for transformers and hpcrl.Generator. ValueError before it is written."""
        folder = self.path / "hf"
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder}: not written yet, the run is {self.state}; it is written at the end of the run")
        return folder

    def samples(self, step: int | None = None) -> Iterator[StoredSample]:
        """The samples that were trained on, of one step or of all steps in order, read step by step; also of steps
        after the newest checkpoint. ValueError if the given step has none, or a file is damaged."""
        from hpcrl.python.stored_samples import read_samples

        return read_samples(self.path, step)

    def episodes(self) -> list[StoredEpisode]:
        """The episodes that validations have kept, by step, domain and kind."""
        found = []
        for step in steps_in(self.path / "episodes"):
            for path in sorted((self.path / "episodes" / step_name(step)).glob("*/*.txt")):
                found.append(StoredEpisode(step, path.parent.name, path.stem, path))
        return found

    def checkpoints(self, verify: bool = False) -> list[SavedCheckpoint]:
        """The committed checkpoints, ascending. With `verify`, all their files are read and hashed."""
        root = self.path / "checkpoints"
        check = first_damage if verify else (lambda path, files: "")
        return [
            SavedCheckpoint(step, root / step_name(step), problem_of(root / step_name(step), check))
            for step in steps_in(root)
        ]

    def validation(self, step: int | None = None) -> list[dict[str, Any]]:
        """The responses of a validation, of the newest by default: dicts with set, prompt, response, score, rewards and
        more. Empty if the run has written none. ValueError if the given step has none."""
        steps = evaluated_steps(self.path)
        if step is not None and step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"{self.path / FOLDER} has no responses of step {step}; it has {known}")
        if not steps:
            return []
        return read_responses(responses_file(self.path, steps[-1] if step is None else step))[1]

    @property
    def evaluation(self) -> dict[str, Any]:
        """Of a run that only evaluates: evaluation.json, with `metrics`, and with scores and settings by set in `sets`.
        Empty before its end. ValueError if it is damaged."""
        file = self.path / SUMMARY
        if not file.is_file():
            return {}
        try:
            return dict(json.loads(file.read_bytes()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error

    def wait(self, timeout_s: float | None = None, poll_s: float = 2.0) -> RunHandle:
        """Wait until the run is finished, over requeues and links of a chain; returns the run. RunFailed if it has
        ended otherwise or never started, TimeoutError after timeout_s."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ended = 0
        while not (told := self._state()).startswith("finished"):
            ended = ended + 1 if told.startswith(ENDED) else 0
            if ended >= SETTLED:
                self._fail(told)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.path} is not finished after {timeout_s:g} s: {told}")
            time.sleep(poll_s if not ended else min(poll_s, 1.0))
        return self

    def stop(self) -> bool:
        """Ask a run that goes on to save at the next step boundary and stop, as `scancel` or SIGTERM do; cancel a job
        that waits. Returns at once: whether something was asked. ValueError if the run is on another host or
        cluster, SlurmError if Slurm refuses."""
        owner = self._folder.owner
        if "ended" not in owner and "pid" in owner and not lives_as_job(owner):
            if owner["host"] != os.uname().nodename:
                raise ValueError(f"{self.path}: pid {owner['pid']} runs on host {owner['host']}; stop it there")
            if process_lives(owner["pid"], owner["process_start"]):
                os.kill(owner["pid"], signal.SIGTERM)
                return True
        job = find_job(self._folder)
        if job is not None and job.state == "UNKNOWN":
            raise ValueError(f"{self.path}: job {job.id}: {job.reason}")
        if job is None or not job.lives:
            return False
        slurm.cancel([*dict.fromkeys([*submitted_jobs(self.path), job.id])])
        return True

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.path)

    def _state(self) -> str:
        folder = self._folder
        return state(folder, find_job(folder))

    def _fail(self, told: str) -> NoReturn:
        folder = self._folder
        outcome = read_record(world_folder(self.path, folder.attempt) / OUTCOME, code=int)
        error = last_error(folder) if told.startswith(("stopped", "lost")) else ""
        raise RunFailed([f"{self.path}: {told}{f' ({error})' if error else ''}"], outcome.get("code", ExitCode.FAILED))


def _is_run(folder: Path) -> bool:
    """Whether a folder has anything of a run, or nothing yet."""
    if not folder.is_dir():
        return False
    return any((folder / name).exists() for name in (CONFIG, SUBMITTED, OWNERS, FACTS, PLAN)) or not any(
        folder.iterdir()
    )
