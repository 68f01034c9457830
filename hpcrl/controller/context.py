"""The interface of a run for its pipeline: steps, rollouts, trainer, weights, checkpoints, metrics."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.controller.best import best_line
from hpcrl.controller.best_effort import best_effort
from hpcrl.controller.building import Parts
from hpcrl.controller.deadline import SPARE_S, Deadline
from hpcrl.controller.debug import StoredRollouts
from hpcrl.controller.examples import TABLE, as_table, read_examples
from hpcrl.controller.guard import Guard, Stopped
from hpcrl.controller.rollouts import Rollouts
from hpcrl.controller.supervised import AnswerRows
from hpcrl.controller.tracking import start_trackers
from hpcrl.metrics.log import MetricsLog, read_metrics
from hpcrl.metrics.plot import plot as draw_plot
from hpcrl.metrics.progress import summary
from hpcrl.metrics.stats import Stats, flatten, merge
from hpcrl.rollout.loop import PendingPrompt
from hpcrl.system.cli import in_shell
from hpcrl.system.files import steps_in
from hpcrl.timeline.recorder import Recorder

WRITE_S = 10.0
"""Time to write the last steps' timelines when the run ends."""


class Run:
    """Created by hpcrl.controller.main from the parts that hpcrl.controller.building builds."""

    def __init__(self, config: Config, run_dir: Path, parts: Parts, timeline: Recorder | None = None):
        """`timeline` records what ranks and samples do, from here on."""
        self.config, self._run_dir, self._timeline = config, run_dir, timeline
        self._roles, self._weights, self._profiler = parts.roles, parts.weights, parts.profiler
        self.trainer, self.reference, self.teacher = parts.trainer, parts.reference, parts.teacher
        self.critic, self.imitation = parts.critic, parts.imitation
        self._data, self.evaluation, self.checkpoint = parts.data, parts.evaluation, parts.checkpoint
        self.first_step, self.last_step, self._why = parts.first_step, config.max_steps, ""
        resumed = self.checkpoint.restored_step
        trackers = functools.partial(start_trackers, config, run_dir, resumed)
        self._metrics = MetricsLog(run_dir, resumed, config.max_steps, config.eval_every, trackers=trackers)
        rows = read_metrics(run_dir)
        self.last_logged: dict[str, float | None] = rows[-1] if rows else {}
        deadline = Deadline()
        for row in rows[1:]:
            deadline.record((row.get("time/step_total") or 0.0) + (row.get("time/val_step") or 0.0))
        checkpoint, lead_s = self.checkpoint, config.cluster.signal_lead_s
        save_s, bound = checkpoint.expected_save_s, config.trainer.max_mismatch if config.debug == "none" else None
        saved = functools.partial(steps_in, run_dir / "checkpoints")
        self.guard = Guard(checkpoint.check_owner, save_s, lead_s, deadline, bound, saved)
        self._step_started = time.perf_counter()
        if timeline is not None and not self.first_step:
            timeline.begin(0)

    @property
    def rollouts(self) -> Rollouts | StoredRollouts:
        """The training rollouts, for pipelines with rollouts."""
        assert isinstance(self._data, Rollouts | StoredRollouts), f"pipeline {self.config.pipeline} has no rollouts"
        return self._data

    @property
    def rows(self) -> AnswerRows:
        """The training rows, for supervised pipelines."""
        assert isinstance(self._data, AnswerRows), f"pipeline {self.config.pipeline} has no rows of answers"
        return self._data

    def steps(self) -> Iterator[int]:
        """The remaining steps, counted from 1. A step trains weights version step - 1 and publishes version step.

        Raises Stopped, after saving a checkpoint if the time suffices, at the first step boundary at which a signal has
        arrived or the job would end before another step is trained and saved.
        """
        for num_batches in self.reference.fill(self.first_step):
            if why := self.guard.must_stop():
                done = f"the reference's log-probs of {num_batches} more batches are stored"
                raise Stopped(self.guard.stop_signal, f"stopped by {why} after step {self.first_step}, {done}")
        for step in range(self.first_step + 1, self.config.max_steps + 1):
            self.guard.before_step()
            self._profiler.begin(step)
            self._step_started = time.perf_counter()
            if self._timeline is not None:
                self._timeline.begin(step)
            yield step
            if self._timeline is not None:
                self._timeline.end()
            self.guard.after_step(time.perf_counter() - self._step_started)
            self._profiler.end(step)
            if step < self.config.max_steps and (why := self.guard.must_stop()):
                saved = self.checkpoint.save_within(step, self.guard.left_s())
                raise Stopped(
                    self.guard.stop_signal, f"stopped by {why} after step {step}, {_what_is_saved(step, saved)}"
                )

    def pending_prompts(self) -> list[PendingPrompt]:
        """The prompts that are being generated or scored, oldest first."""
        return self._data.pending() if isinstance(self._data, Rollouts) else []

    def stop(self, signal_number: int) -> None:
        """End the run at the next step boundary because of a signal; safe in a signal handler."""
        self.guard.stop(signal_number)

    def ask(self, role: str, question: str, **values: Any) -> Stats:
        """Merged answers of all ranks of a role that answers questions (hpcrl.workers.role.Answers)."""
        return self._roles.ask(role, question, values)

    def update_weights(self, version: int) -> Stats:
        """Load the trainers' weights into every living replica, as this version."""
        stats = self._weights.update_weights(version)
        if isinstance(self._data, Rollouts):
            self._data.scheduler.weights_arrived(version)
        return stats

    def evaluate(self, step: int) -> Stats:
        """Validation scores if due at this step (0: before training), else empty."""
        return self.evaluation.scores(step) if self.evaluation is not None and self.validates_at(step) else {}

    def validates_at(self, step: int) -> bool:
        """Whether validation is due at this step."""
        every = self.config.eval_every
        return bool(every) and (step % every == 0 or step == self.config.max_steps)

    def end_at(self, step: int, why: str) -> None:
        """Declare the run complete at this step, before max_steps."""
        self.last_step, self._why = step, why
        if self._timeline is not None:
            self._timeline.discard_after(step)

    @property
    def reason(self) -> str:
        """Why a complete run ended."""
        return f"trained {self.last_step} step{'s' * (self.last_step != 1)}" + (f": {self._why}" if self._why else "")

    def log(self, step: int, *parts: Stats) -> None:
        """Write the step's metrics. SupersededError, before anything is written, if another attempt owns the run;
        NoProgress if several steps show no learning; MismatchError if trainer and generator differ too much."""
        stats = merge([*parts, self.checkpoint.take_stats(), self._roles.load()])
        flat = flatten({name: value for name, value in stats.items() if not name.startswith("_")})
        evaluated = stats["time/val_step"].total if "time/val_step" in stats else 0.0
        elapsed = time.perf_counter() - self._step_started - evaluated
        tokens = stats["_tokens"].total if "_tokens" in stats else 0.0
        samples = stats["_samples"].total if "_samples" in stats else 0.0
        flat |= {"system/global_step": step, "system/samples": samples, "time/step_total": elapsed}
        if tokens:
            flat["system/tps"] = tokens / elapsed
        self.guard.fence()
        self._metrics.log(step, flat)
        self.checkpoint.best.judge(step, flat, evaluated="time/val_step" in stats)
        if "time/val_step" in stats and (rows := as_table(step, read_examples(self._run_dir).get(step, []))):
            self._metrics.call_trackers(lambda tracker: tracker.table(TABLE, step, rows))
        self.guard.check_progress(step, stats)
        self.guard.check_mismatch(step, stats)
        self.last_logged = dict(flat)

    def finish(self) -> None:
        """Save, and export the policy."""
        self.checkpoint.save(self.last_step)
        self.trainer.export(self._run_dir / "hf")
        self.critic.export(self._run_dir / "hf_critic")
        self._metrics.end_progress()

    def report(self) -> str:
        """Draw the plot; return the text for the user. Called after the run is recorded as finished."""
        evaluation, last, episodes = self.evaluation, self.last_step, self._run_dir / "episodes"
        examples = "" if evaluation is None else best_effort("examples", lambda: evaluation.before_and_after(last), "")
        told = best_effort(
            "the summary", lambda: summary(read_metrics(self._run_dir), self.config.max_steps), self.reason
        )
        early = [self.reason] if self._why else []
        plot = best_effort("the plot", lambda: draw_plot(self._run_dir), None)
        if plot is not None:
            self._metrics.call_trackers(lambda tracker: tracker.image("plot", plot))
        shown = ([f"plot {plot}"] if plot is not None else []) + ([f"episodes {episodes}"] if episodes.is_dir() else [])
        found = self.checkpoint.best.best
        best = [f"best {best_line(found, self._run_dir)}"] if found is not None else []
        exported = f"HF checkpoint {self._run_dir / 'hf'} in {self.config.model.dtype}"
        return "\n".join([examples, told, *early, *shown, *best, exported])

    def close(self, within_s: float = math.inf) -> str:
        """Close the trackers within this time, and within the job's remaining time minus SPARE_S, in which the process
        exits; return how to upload offline metrics, as text for the user."""
        within_s = min(within_s, max(1.0, self.guard.left_s() - SPARE_S))
        if self._timeline is not None:
            self._timeline.close(min(within_s, WRITE_S))
        hints = self._metrics.close(within_s=within_s)
        return in_shell("".join(f"upload  {hint}\n" for hint in hints))


def _what_is_saved(step: int, saved: int) -> str:
    """`saved` is the newest checkpoint's step, below `step` if there was only time to finish an earlier save."""
    if saved == step:
        return "everything is saved"
    return f"saved up to step {saved}: there was no time for another save"
