"""Evaluates a run's checkpoints while the run goes on, each by a run of its own, and shows the scores over steps."""

from __future__ import annotations

import contextlib
import glob
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.checkpoint.best import Best, BestMode, best_of
from hpcrl.launch.watched import Watched
from hpcrl.metrics.evaluated import SUMMARY, scores_in_short
from hpcrl.metrics.over_steps import table_over_steps, unlike_the_last
from hpcrl.run_folder import CONFIG, FINISHED, read_finished
from hpcrl.run_folder.opening import EVALUATED
from hpcrl.system.cli import show
from hpcrl.system.exit_codes import SIGNAL_CODES, ExitCode
from hpcrl.system.files import remove, step_name, steps_in
from hpcrl.system.signals import STOPPING

POLL_S = 15.0
"""Seconds between two looks at a run, which are a few small reads and, for a job, a query of Slurm."""
MODEL = "hf"
"""In EVALUATED: the model of the checkpoint."""


@dataclass
class Following:
    """The evaluations of one run's checkpoints.

    Args:
        folder_of: Step -> run folder of its evaluation; after a branch it is another one for the same step.
        evaluate: Starts or continues the evaluation of a step, or submits it; returns the launch's exit code.
        metric: Names the best step, with `mode`.
        every: Other steps than its multiples are left out.
        newest: Only the newest checkpoint is evaluated, and none that is older than an evaluated one.
        keep_best: After each evaluation, converted models are removed, except that of the best step.
    """

    run: Path
    folder_of: Callable[[int], Path]
    evaluate: Callable[[int], int]
    metric: str
    mode: BestMode
    every: int = 1
    newest: bool = False
    keep_best: bool = False
    _seen: set[int] = field(default_factory=set)
    _done: set[Path] = field(default_factory=set)
    _told: set[Path] = field(default_factory=set)

    def follow(self) -> int:
        """Evaluate each checkpoint, the oldest first, until the run has ended and none is left; print the table.

        Returns the exit code of the first evaluation that does not succeed, else DONE. ValueError if there is nothing
        to evaluate, or if a file of an evaluation is damaged.
        """
        run, waits = Watched(self.run), False
        while True:
            ended = run.ended()  # before checkpoints are listed, or the last one could be missed
            left = self._left()
            self._tell_skipped(left)
            if left:
                waits = False
                if code := self._evaluate(left[-1] if self.newest else left[0]):
                    self._show_table()
                    return code
            elif ended:
                return self._conclude(ended)
            else:
                if not waits:
                    show(f"waiting for the next checkpoint of {self.run}; after Ctrl-C the same command goes on")
                waits = True
                time.sleep(POLL_S)

    def _left(self) -> list[int]:
        """Steps to evaluate, ascending: with a checkpoint, or whose checkpoint was converted before a kill."""
        begun = [step for step, folder in self._folders() if (folder / EVALUATED / MODEL).is_dir()]
        steps = sorted({*steps_in(self.run / "checkpoints"), *begun})
        if self.newest:
            after = max((step for step in steps if self._is_done(step)), default=-1)
            steps = [step for step in steps if step > after]
        return [step for step in steps if step % self.every == 0 and not self._is_done(step)]

    def _tell_skipped(self, left: Sequence[int]) -> None:
        if self.newest:
            for step in left[:-1]:
                self._skip(step, f"step {left[-1]} is newer")
        for step in sorted(self._seen - set(left)):
            if not self._is_done(step):
                self._skip(step, "its checkpoint was removed (keep_checkpoints; --every N leaves out steps)")
        self._seen = set(left)

    def _skip(self, step: int, why: str) -> None:
        if (folder := self.folder_of(step)) not in self._told:
            show(f"step {step} is skipped: {why}")
        self._told.add(folder)

    def _evaluate(self, step: int) -> int:
        """Evaluate a step, or wait for its evaluation if that runs or waits already. Returns its exit code; DONE for a
        step whose checkpoint was removed meanwhile."""
        folder = self.folder_of(step)
        if not (other := Watched(folder, aloud=True)).ended():
            show(f"step {step}: its evaluation was started before, waiting for it")
            self._await(other)
        if not self._is_done(step):
            show(f"\nstep {step}: evaluation in {folder}")
            before = [signal.getsignal(number) for number in STOPPING]
            try:
                code = self.evaluate(step)
            except (ValueError, OSError):
                if (self.run / "checkpoints" / step_name(step)).is_dir() or (folder / EVALUATED / MODEL).is_dir():
                    raise
                self._skip(step, "its checkpoint was removed before it was read (keep_checkpoints)")
                if not (folder / CONFIG).exists():
                    remove(folder / EVALUATED)
                    with contextlib.suppress(OSError):  # missing, or with files of someone else
                        folder.rmdir()
                return ExitCode.DONE
            for number, handler in zip(STOPPING, before, strict=True):  # it came just before the evaluation's end
                if code == ExitCode.DONE and handler != signal.SIG_IGN == signal.getsignal(number):
                    return SIGNAL_CODES.get(number, ExitCode.REQUEUE)
            if code:
                return code
            if how := self._await(Watched(folder, lived=True, aloud=True)):
                text = f"{folder} is {how}" if how.partition(":")[0] != "finished" else f"{folder} has no {SUMMARY}"
                print(f"hpcrl eval: step {step} is not evaluated: {text}", file=sys.stderr)
                return ExitCode.FAILED
        show(f"step {step}: {', '.join(scores_in_short(self._summary(folder)))}")
        if self.keep_best:
            self._remove_models()
        return ExitCode.DONE

    def _await(self, evaluation: Watched) -> str:
        """Return when the evaluation is done, or has ended otherwise, with its state."""
        while not _has_results(evaluation.folder):
            if how := evaluation.ended():
                return how if not _has_results(evaluation.folder) else ""
            time.sleep(POLL_S)
        return ""

    def _is_done(self, step: int) -> bool:
        folder = self.folder_of(step)
        if folder not in self._done and _has_results(folder):
            self._done.add(folder)
        return folder in self._done

    def _folders(self) -> list[tuple[int, Path]]:
        """(step, folder) of all evaluations of the run's present branch, by step."""
        own = self.folder_of(0)
        begin = own.name[: own.name.rindex(step_name(0))]
        found = []
        for folder in own.parent.glob(f"{glob.escape(begin)}step_*"):
            number = re.match(r"step_(\d{6,12})(?!\d)", folder.name.removeprefix(begin))
            if number and self.folder_of(int(number[1])) == folder:
                found.append((int(number[1]), folder))
        return sorted(found)

    def _evaluated(self) -> dict[int, Path]:
        return {step: folder for step, folder in self._folders() if self._is_done(step)}

    def _summary(self, folder: Path) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((folder / SUMMARY).read_bytes())
            scores_in_short(found)
            if not isinstance(found["metrics"], dict):
                raise ValueError("metrics is no object")
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{folder / SUMMARY} cannot be read: {why}; remove {folder} to evaluate it again"
            ) from error

    def _best(self, summaries: dict[int, dict[str, Any]]) -> Best | None:
        rows = ({**own["metrics"], "step": step} for step, own in sorted(summaries.items()))
        return best_of(rows, self.metric, self.mode, summaries)

    def _remove_models(self) -> None:
        folders = self._evaluated()
        best = self._best({step: self._summary(folder) for step, folder in folders.items()})
        for step, folder in folders.items():
            model, aside = folder / EVALUATED / MODEL, folder / EVALUATED / f".{MODEL}.removed"
            if best is not None and step != best.step:
                if model.is_dir():  # first out of the way, so a kill leaves no part of a model
                    remove(aside)
                    model.rename(aside)
                remove(aside)

    def _conclude(self, ended: str) -> int:
        if not self._show_table():
            steps = steps_in(self.run / "checkpoints")
            why = f"--every {self.every}: no multiple among the checkpoints {steps}" if steps else "no checkpoint"
            raise ValueError(f"{self.run}: nothing to evaluate, {why}, and the run is {ended}")
        show(f"{self.run} is {ended}")
        return ExitCode.DONE

    def _show_table(self) -> bool:
        """Print the table of all evaluated steps; False without one."""
        folders = self._evaluated()
        summaries = {step: self._summary(folder) for step, folder in folders.items()}
        if not summaries:
            return False
        lines = ["", *table_over_steps(summaries)]
        if others := unlike_the_last(summaries):
            steps = ", ".join(map(str, others))
            lines.append(f"note: other sets, sampling or prompts than step {max(summaries)}: {steps}")
        if old := [step for step, folder in folders.items() if self._is_outdated(step, folder)]:
            shown = ", ".join(str(folders[step]) for step in old)
            lines.append(f"note: older than the checkpoint; if the run was trained again, remove {shown}")
        best = self._best(summaries)
        if best is None:
            lines.append(f"best step unknown: no evaluation has {self.metric}")
        else:
            model = folders[best.step] / EVALUATED / MODEL
            where = f", model {model}" if model.is_dir() else ""
            lines.append(f"best step {best.step}: {self.metric} {best.value:.4g} ({self.mode}){where}")
        show("\n".join(lines))
        return True

    def _is_outdated(self, step: int, folder: Path) -> bool:
        """Whether the checkpoint was written after its evaluation ended, as when a run is removed and trained again."""
        try:
            written = (self.run / "checkpoints" / step_name(step) / "manifest.json").stat().st_mtime
            return written > (folder / FINISHED).stat().st_mtime
        except OSError:  # removed by keep_checkpoints
            return False


def _has_results(folder: Path) -> bool:
    return (folder / SUMMARY).is_file() and bool(read_finished(folder))
