"""Save and restore a run: every rank writes and seals its files, the controller commits them with the small state."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from hpcrl.checkpoint.commit import Facts, FileEntry, begin, commit, find_latest, seal_files
from hpcrl.checkpoint.lineage import abandon_after
from hpcrl.checkpoint.state import read_state, write_state
from hpcrl.config import Config
from hpcrl.dist.controller import Controller, RankFailed
from hpcrl.dist.messages import LoadState, SaveState
from hpcrl.layout import RoleLayout
from hpcrl.rundir import check_owner


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none can be read; the message says which and why."""


class Stateful(Protocol):
    """What knows where in the data the run is: its part of the small state, by section."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpoints:
    """The run's checkpoints/ folder."""

    def __init__(
        self,
        controller: Controller,
        layout: RoleLayout,
        config: Config,
        run_dir: Path,
        attempt: int,
        owner: Stateful,
    ):
        self._controller, self._layout, self._config = controller, layout, config
        self._run_dir, self._root, self._attempt = run_dir, run_dir / "checkpoints", attempt
        self._owner = owner
        self._saved_step = self.restored_step = -1
        self.counters: dict[str, float] = {"seconds": 0.0}
        self._started = time.time()
        self._full_save_s = 0.0

    def expected_save_s(self) -> float:
        """Seconds that a full synchronous save takes, as measured with the last one; 0 before the first."""
        return self._full_save_s

    def check_owner(self) -> None:
        """SupersededError when another attempt owns the run: nothing may be written into its folder any more."""
        check_owner(self._run_dir, self._attempt)

    def maybe_save(self, step: int) -> None:
        """Save where save_every asks for it."""
        if self._config.save_every and step % self._config.save_every == 0:
            self.save(step)

    def save(self, step: int) -> None:
        """Commit a checkpoint of `step` (idempotent).

        SupersededError when another attempt owns the run, CheckpointError when it cannot be written, which leaves those
        before it as they are."""
        if step == self._saved_step:
            return
        start = time.perf_counter()
        with _explained(f"checkpoint of step {step} not written to {self._root}"):
            self._write(step)
        self._full_save_s = time.perf_counter() - start
        self._saved_step = step

    def _write(self, step: int) -> None:
        tmp = begin(self._root, step, self._attempt)
        trainers = self._layout.ranks["trainer"]
        answers = self._controller.call(dict.fromkeys(trainers, SaveState(str(tmp))))
        entries = [FileEntry(*file) for answer in answers.values() for file in answer.files]
        self.counters["seconds"] += time.time() - self._started
        self._started = time.time()
        state = {"cursor": {}, "scheduler": {}, **self._owner.state_dict()}
        name = write_state(tmp, {**state, "counters": {**self.counters, "step": step}})
        entries += seal_files(tmp, [name])
        world: dict[str, Any] = {role: list(ranks) for role, ranks in self._layout.ranks.items()}
        facts = Facts(config_hash=_hash(self._config), weight_version=step, attempt=self._attempt, world=world)
        commit(self._root, step, tmp, entries, facts, keep=self._config.keep_checkpoints, fence=self.check_owner)

    def restore(self) -> int:
        """Load the newest valid checkpoint and set aside what came after it; returns its step, 0 without one.

        CheckpointError when there are checkpoints and none can be used."""
        with _explained(f"no checkpoint read from {self._root}"):
            return self._read()

    def _read(self) -> int:
        latest = find_latest(self._root) if self._root.exists() else None
        for problem in latest.problems if latest is not None else []:
            print(f"hpcrl: checkpoints: {problem}", flush=True)
        step = latest.manifest.step if latest is not None and latest.manifest is not None else -1
        self.restored_step = step
        abandoned = abandon_after(self._run_dir, step, self._attempt)
        if abandoned:
            print(f"hpcrl: {len(abandoned)} item(s) written after step {step} moved to abandoned/", flush=True)
        if latest is None or latest.path is None:
            return 0
        state = read_state(latest.path)
        trainers = self._layout.ranks["trainer"]
        answers = self._controller.call(dict.fromkeys(trainers, LoadState(str(latest.path))))
        for warning in sorted({text for answer in answers.values() for text in answer.texts}):
            print(f"hpcrl: {warning}", flush=True)
        self._owner.load_state_dict(state)
        self.counters |= {name: value for name, value in state["counters"].items() if name in self.counters}
        self._saved_step = step
        print(f"hpcrl: resumed from {latest.path.name}", flush=True)
        return step


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what a full disk or damaged files raise, here or on a rank that saves or loads, into a CheckpointError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{what}: {error}") from error
    except RankFailed as error:
        if error.event.kind != "input" or error.event.command not in (SaveState.__name__, LoadState.__name__):
            raise
        raise CheckpointError(f"{what}: {error}") from error


def _hash(config: Config) -> str:
    return hashlib.sha256(json.dumps(config.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
