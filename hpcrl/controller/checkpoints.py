"""Save and restore a run: every rank writes and seals its files, the controller commits them with the small state."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpcrl.algorithms.adaptive import after_changes
from hpcrl.checkpoint.best import Best
from hpcrl.checkpoint.commit import (
    Facts,
    FileEntry,
    Latest,
    begin,
    commit,
    find_latest,
    find_step,
    newest_whole,
    seal_files,
)
from hpcrl.checkpoint.lineage import abandon_after, cut_metrics, gaps, since
from hpcrl.checkpoint.room import Room, Size
from hpcrl.checkpoint.state import STATE, encode_state, read_state
from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.controller.best import BestStep
from hpcrl.controller.failed_saves import FailedSaves
from hpcrl.controller.long_commands import PolledOperation, Stalled, raise_if_unwritten
from hpcrl.controller.saved_layout import differences, layout_facts
from hpcrl.messaging.dispatcher import Controller, RankFailed, Started
from hpcrl.messaging.messages import (
    AbandonSave,
    CheckFiles,
    FinishCheck,
    FinishSave,
    LoadPending,
    LoadState,
    SavePending,
    SaveState,
)
from hpcrl.metrics.log import read_metrics
from hpcrl.metrics.stats import Stats, merge, scalar
from hpcrl.planner.storage import planned_checkpoint_bytes
from hpcrl.rollout.pending import drop_others
from hpcrl.run_folder import changed_keys, check_owner, newest_branch, settle_branch
from hpcrl.system.files import is_storage_error, steps_in, write_durably

logger = logging.getLogger(__name__)

COMMANDS = [c.__name__ for c in (SaveState, SavePending, FinishSave, CheckFiles, FinishCheck, LoadState, LoadPending)]
POLL_EVERY_S = 5.0  # between polls of a running save within a step
LOAD_PER_CHECK = 2.0
"""Extra time for loading, as a multiple of the time that checking all files took."""
WRITTEN = "time/save_write"
"""Statistic of FinishSave: seconds of a rank's writer, present once it has ended."""
FILES_PER_RANK = 3
"""Of a checkpoint, with a part of the folders and of rank 0's files; until the first one is measured."""


class CheckpointError(RuntimeError):
    """Checkpoints exist, but none can be read."""


class NotSavedError(RuntimeError):
    """A checkpoint, or data after it, could not be written or moved, which may succeed at the next attempt."""


class Adapting(Protocol):
    """A holder of small state."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Stateful(Adapting, Protocol):
    """A holder of the run's position in the data."""

    def held(self) -> dict[int, list[int]]:
        """First rank of each replica -> the samples of this state that the replica holds."""


@dataclass
class _Snapshot:
    """A running save. `best` is the best evaluation when it began, `stall_s` how long it blocked the ranks;
    `committing` exists once all files are written."""

    step: int
    folder: Path
    state: bytes
    began: float
    stall_s: float
    writing: PolledOperation
    held: list[FileEntry]
    best: Best | None
    copied: bool
    committing: Future[float] | None = None


class Checkpoints:
    """The run's checkpoints/ folder. Only one save runs at a time.

    A save blocks training while every rank copies its state to host memory. Writing continues during the next steps;
    then a thread commits, while rollouts are generated or at a step boundary. A save that the run waits for, at its end
    or before it stops, is written without a copy.

    The run goes on after a failure of a save between steps (max_failed_saves); the save that it waits for must succeed.
    """

    def __init__(
        self,
        controller: Controller,
        layout: RoleLayout,
        config: Config,
        run_dir: Path,
        attempt: int,
        owner: Stateful,
        adapting: Sequence[Adapting],
    ):
        """`owner` holds the run's position in the data; `adapting` are other parts with small state (trainer)."""
        self._controller, self._layout, self._config = controller, layout, config
        self._run_dir, self._root, self._attempt = run_dir, run_dir / "checkpoints", attempt
        self._owner, self._adapting = owner, adapting
        self._writers = sorted({*layout.ranks["trainer"], *layout.ranks.get("critic", ())})  # ranks with state to save
        self._saved_step = self.restored_step = -1
        self.counters: dict[str, float] = {"seconds": 0.0, "save_seconds": 0.0}
        self._started = time.time()
        self._snapshot: _Snapshot | None = None
        self._check_s = self._polled = 0.0
        self._thread = ThreadPoolExecutor(1, "commit")
        self._stats: Stats = {}
        self.best = BestStep(config, self._root)
        self._failures = FailedSaves(config.max_failed_saves)
        self._room = Room(self._root, attempt, config.prune_when_full)

    def expected_save_s(self) -> float:
        """Expected seconds until a save that starts now is committed, by the last save of any attempt; 0 if none."""
        whole = self.counters["save_seconds"]
        if self._snapshot is None:
            return whole
        return whole + max(0.0, whole - (time.perf_counter() - self._snapshot.began))

    def take_stats(self) -> Stats:
        """Seconds of saves since the last call: time/save (training was blocked, also by an unfinished earlier save),
        time/save_drain (from the copy to the commit); and checkpoint/failed, the saves in a row that failed, if any."""
        stats, self._stats = self._stats, {}
        failed = self._failures.take_worst()
        return stats | ({"checkpoint/failed": scalar(failed)} if failed else {})

    def check_owner(self) -> None:
        """SupersededError if another attempt owns the run folder."""
        check_owner(self._run_dir, self._attempt)

    def maybe_save(self, step: int) -> None:
        """Begin a save if due by save_every or keep_best, or since the last one failed, and commit an earlier save if
        it is written. Errors as in save(), but NotSavedError only if the run cannot go on without the checkpoint."""
        start = time.perf_counter()
        self._advance(step, wait=self._is_due(step))
        if self._is_due(step) and step > self._saved_step:
            try:
                self._begin(step)
            except NotSavedError as error:
                self._go_on_without(step, step, error)
            self._stats = merge([self._stats, {"time/save": scalar(time.perf_counter() - start)}])

    def _is_due(self, step: int) -> bool:
        again = self._failures.in_row > 0 and self._snapshot is None
        return (bool(self._config.save_every) and step % self._config.save_every == 0) or self.best.is_at(step) or again

    def commit_if_written(self) -> None:
        """Commit the running save within a step if it is written, since the next step boundary may be too late. Does
        not wait for ranks; errors as in maybe_save()."""
        if (snapshot := self._snapshot) is None or time.monotonic() - self._polled < POLL_EVERY_S:
            return
        self._polled = time.monotonic()
        try:
            with self._explained(snapshot.step):
                if snapshot.committing is None and not snapshot.writing.poll(FinishSave(0.0)):
                    return
            self._drain(wait=False)
        except NotSavedError as error:
            self._go_on_without(snapshot.step, -1, error)

    def save(self, step: int) -> None:
        """Commit a checkpoint of `step` and return once it exists (idempotent).

        SupersededError if another attempt owns the run, NotSavedError if the checkpoint cannot be written; the
        newest earlier one remains."""
        self._advance(step, wait=True)
        if step > self._saved_step:
            self._begin(step, copy=False)
            self._drain(wait=True)

    def save_within(self, step: int, seconds: float) -> int:
        """save(step), but only commit the running save if another takes over `seconds`; return the last saved step."""
        if self._snapshot is not None and self.expected_save_s() > seconds:
            self._drain(wait=True)
        else:
            self.save(step)
        return self._saved_step

    def discard(self) -> None:
        """Remove this attempt's uncommitted files, so a full disk has room for the error message. Called last."""
        if self._snapshot is not None and (committing := self._snapshot.committing) is not None:
            wait([committing], self._config.timeouts.command_s)
            if not committing.done():
                return  # it may still get its final name
        for folder in self._root.glob(f"step_*.tmp-{self._attempt}"):
            shutil.rmtree(folder, ignore_errors=True)  # if a rank still writes into it, the next attempt removes it

    def _advance(self, step: int, wait: bool) -> None:
        """_drain() at the boundary of `step`; a failure does not end the run if it may go on without the checkpoint."""
        snapshot = self._snapshot
        try:
            self._drain(wait)
        except NotSavedError as error:
            assert snapshot is not None
            self._go_on_without(snapshot.step, step, error)

    def _go_on_without(self, step: int, now: int, error: NotSavedError) -> None:
        """Give up the save of `step`, at the boundary of step `now`, or within a step (-1); raises the error if the run
        must end. Does not wait for ranks."""
        if is_storage_error(error.__cause__) and step in steps_in(self._root):  # committed, but LATEST or BEST is older
            logger.warning("the checkpoint of step %d exists, but not all of its commit succeeded: %s", step, error)
            self._saved_step, self._snapshot = step, None
            self._failures.end()
            return
        self._failures.add(error)
        self._snapshot = None
        for rank in self._writers:
            self._controller.send(rank, AbandonSave())
        self.discard()
        if self.best.is_at(step):
            self.best.forget(step, read_metrics(self._run_dir), now)

    def _begin(self, step: int, copy: bool = True) -> None:
        """Start to write each rank's state, or a copy if training continues; keep the small state of this step."""
        began = time.perf_counter()
        self.check_owner()  # begin() removes other files of this step, which may be a newer attempt's
        with self._explained(step):
            self._room.make(self._kept, was_refused=self._failures.was_refused, anyway=not copy)
            folder = begin(self._root, step, self._attempt)
            self.counters["seconds"] += time.time() - self._started
            self._started = time.time()
            content, holding = self._hold(step, folder)
            self._controller.call(dict.fromkeys(self._writers, SaveState(str(folder), copy)))
            while len(answers := self._controller.finish(holding)) < len(holding):  # a generator was lost
                content, holding = self._hold(step, folder)
            raise_if_unwritten(self._controller, answers)
            held = [FileEntry(*file) for done in answers.values() for file in done.files]
        writing = PolledOperation(self._controller, self._writers, "writing")
        self._snapshot = _Snapshot(
            step, folder, content, began, time.perf_counter() - began, writing, held, self.best.best, copy
        )

    def _kept(self) -> set[int]:
        """The checkpoints that are never deleted to make room: those that a resume or the best needs; empty if none
        is known to be whole, and none may be deleted."""
        whole = newest_whole(self._root) if self._saved_step >= 0 else None
        return {whole, self._saved_step, *self.best.kept_steps()} if whole is not None else set()

    def _hold(self, step: int, folder: Path) -> tuple[bytes, Started]:
        """Return the small state, and make generators write its samples before a later command can drop them."""
        state = {"cursor": {}, "scheduler": {}, **self._owner.state_dict()}
        for part in self._adapting:
            state |= part.state_dict()
        content = encode_state({**state, "counters": {**self.counters, "step": step}})
        holders = {rank: SavePending(str(folder), samples) for rank, samples in self._owner.held().items()}
        return content, self._controller.start(holders)

    def _drain(self, wait: bool) -> None:
        """Advance the running save as far as possible, or, if `wait`, to its end."""
        if (snapshot := self._snapshot) is None:
            return
        with self._explained(snapshot.step):
            if snapshot.committing is None:
                # Short waits, so a rank with a long write does not look like a hanging rank.
                while not snapshot.writing.ask(FinishSave(self._controller.check_s if wait else 0.0)):
                    if not wait:
                        return
                snapshot.committing = self._thread.submit(self._commit, snapshot)
            if not wait and not snapshot.committing.done():
                return
            commit_s = snapshot.committing.result()
        write_s = max(answer.stats[WRITTEN][0] for answer in snapshot.writing.answers.values())
        self.counters["save_seconds"] = snapshot.stall_s + write_s + commit_s
        drain_s = time.perf_counter() - snapshot.began - snapshot.stall_s
        self._stats = merge([self._stats, {"time/save_drain": scalar(drain_s)}])
        self._saved_step, self._snapshot = snapshot.step, None
        self._failures.end()
        if snapshot.copied:
            self._thread.submit(self._look_ahead)

    def _look_ahead(self) -> None:
        """Warn if another checkpoint as large as the last, or as the planned one, does not fit."""
        with contextlib.suppress(OSError):  # the next save shows it
            if self._saved_step >= 0:
                self._room.measure(self._saved_step)
            elif planned := planned_checkpoint_bytes(self._config):
                self._room.need = Size(planned, FILES_PER_RANK * len(self._writers))
            self._room.foresee(self._kept)

    def _commit(self, snapshot: _Snapshot) -> float:
        """Commit the ranks' files with the small state; return the seconds taken."""
        start = time.perf_counter()
        entries = [FileEntry(*file) for answer in snapshot.writing.answers.values() for file in answer.files]
        entries += snapshot.held
        drop_others(snapshot.folder, [entry.path for entry in snapshot.held])  # written before a generator was lost
        write_durably(snapshot.folder / STATE, snapshot.state)
        entries += seal_files(snapshot.folder, [STATE])
        facts = Facts(attempt=self._attempt, world=layout_facts(self._config, self._layout))
        keep, fence, best = self._config.keep_checkpoints, self.check_owner, snapshot.best
        commit(self._root, snapshot.step, snapshot.folder, entries, facts, keep=keep, fence=fence, best=best)
        return time.perf_counter() - start

    def _explained(self, step: int) -> AbstractContextManager[None]:
        return _explained(f"checkpoint of step {step} not written to {self._root}", NotSavedError)

    def restore(self) -> int:
        """Load the newest valid checkpoint, or the one from which a branch begins (resume_from), and set aside later
        files; returns its step, 0 without one.

        CheckpointError if none of the checkpoints is usable, NotSavedError if later files cannot be set aside, Stalled
        if a rank makes no progress in reading.
        """
        with _explained(f"no checkpoint read from {self._root}", CheckpointError):
            return self._read()

    def _read(self) -> int:
        branch_step = self._config.resume_from
        assert branch_step != "latest", "config.yaml has a step"
        if branch_step is not None:
            latest: Latest | None = Latest(*find_step(self._root, branch_step, self._damage), [])
        else:
            latest = find_latest(self._root, self._damage) if self._root.exists() else None
        for problem in latest.problems if latest is not None else []:
            logger.warning("checkpoints: %s", problem)
        step = latest.manifest.step if latest is not None and latest.manifest is not None else -1
        self.restored_step = step
        self.check_owner()  # reading takes long; a newer attempt may own the run by now
        with self._setting_aside(step):
            abandoned = abandon_after(self._run_dir, step, self._attempt, branch=branch_step is not None)
        if abandoned:
            logger.warning("%d item(s) written %s moved to abandoned/", len(abandoned), since(step))
        stores = self._config.generates and self._config.rollout.save_rollouts
        for gap in gaps(self._run_dir, step, stores):
            logger.warning("%s; continuing without it", gap)
        with self._setting_aside(step):
            self.best.restore(read_metrics(self._run_dir))
        if latest is None or latest.path is None:
            self._thread.submit(self._look_ahead)
            return 0
        assert latest.manifest is not None
        state = read_state(latest.path)
        if branch_step is not None and (branch := newest_branch(self._run_dir)) is not None:
            state |= {"algorithm": after_changes(state.get("algorithm", {}), changed_keys(branch))}
        # Loading reads the same bytes again and cannot report progress, since its ranks wait for each other.
        loads = dict.fromkeys(self._writers, LoadState(str(latest.path)))
        answers = self._controller.call(loads, more_s=LOAD_PER_CHECK * self._check_s)
        warnings = {text for answer in answers.values() for text in answer.texts}
        if moved := differences(latest.manifest.facts.world, layout_facts(self._config, self._layout)):
            warnings.add(
                f"{latest.path.name} was written with {moved}: from here on results are not the same in every bit"
            )
        for warning in sorted(warnings):
            logger.warning("%s", warning)
        with self._setting_aside(step):
            # Again: a superseded attempt that has not noticed it yet may have logged during loading.
            cut_metrics(self._run_dir, step, self._attempt)
        self._owner.load_state_dict(state)
        for part in self._adapting:
            part.load_state_dict(state)
        names = [entry.path for entry in latest.manifest.files]
        held, folder = self._owner.held(), str(latest.path)
        homes = {rank: replica[0] for replica in self._layout.replicas for rank in replica if replica[0] in held}
        self._controller.call({rank: LoadPending(folder, names, held[first]) for rank, first in homes.items()})
        self.counters |= {name: value for name, value in state["counters"].items() if name in self.counters}
        self._saved_step = step
        self._thread.submit(self._look_ahead)
        if branch_step is not None:
            self.check_owner()
            with self._setting_aside(step):
                settle_branch(self._run_dir)
        logger.info("%s from %s", "resumed" if branch_step is None else "branch", latest.path.name)
        return step

    def _setting_aside(self, step: int) -> AbstractContextManager[None]:
        return _explained(f"what was written {since(step)} not set aside in {self._run_dir}", NotSavedError)

    def _damage(self, folder: Path, entries: Sequence[FileEntry]) -> str:
        """The first defect that any rank finds in the files; every trainer rank reads its share."""
        start, trainers = time.perf_counter(), self._layout.ranks["trainer"]
        shares = {rank: entries[i :: len(trainers)] for i, rank in enumerate(trainers)}
        files = {rank: [(entry.path, entry.size, entry.sha256) for entry in share] for rank, share in shares.items()}
        self._controller.call({rank: CheckFiles(str(folder), share) for rank, share in files.items()})
        reading = PolledOperation(self._controller, trainers, "reading")
        while True:
            all_read = reading.ask(FinishCheck(self._controller.check_s))
            damage = next((text for answer in reading.answers.values() for text in answer.texts), "")
            if all_read or damage:
                self._check_s = time.perf_counter() - start
                return damage


@contextlib.contextmanager
def _explained(what: str, kind: type[Exception]) -> Iterator[None]:
    """Turn errors of a full disk or damaged files, on this or a saving or loading rank, into an error of `kind`."""
    try:
        yield
    except (OSError, ValueError, Stalled) as error:
        if isinstance(error, Stalled) and kind is CheckpointError:
            raise  # not damaged: the next attempt may succeed
        raise kind(f"{what}: {error}") from error
    except RankFailed as error:
        if error.event.kind not in ("input", "storage") or error.event.command not in COMMANDS:
            raise
        raise kind(f"{what}: {error}") from error
