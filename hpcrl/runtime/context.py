"""A run as a pipeline sees it: steps, rollouts, trainer, weights, checkpoints, metrics."""

from __future__ import annotations

import functools
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.control import messages
from hpcrl.control.controller import Controller
from hpcrl.data import PromptSource
from hpcrl.metrics.log import MetricsLog, read_metrics
from hpcrl.metrics.progress import summary
from hpcrl.metrics.stats import Stats, flatten, merge
from hpcrl.plot import plot as draw_plot
from hpcrl.rollout.loop import RolloutLoop
from hpcrl.rundir import check_owner
from hpcrl.runtime.deadline import Deadline
from hpcrl.runtime.debug import FixedWeights, IdleTrainer, StoredRollouts
from hpcrl.runtime.evaluation import Evaluation
from hpcrl.runtime.generation import replica_capacity
from hpcrl.runtime.parts import Fabric, Reference, Trainer, Weights, answers_stats
from hpcrl.runtime.rollouts import Rollouts
from hpcrl.runtime.rows import AnswerRows
from hpcrl.runtime.saves import Checkpoints
from hpcrl.spec.tables import ROLES

MAX_FRUITLESS_STEPS = 3
"""Steps in a row without an update, or with a loss that is not finite, after which a run ends."""
LOSSES = ("actor/total_loss", "sft/loss")


class Stopped(Exception):
    """The run ends early at a step boundary. signal_number: 0 where the time is over. saved: the step of its newest
    checkpoint, an earlier one where there was only the time to finish that."""

    def __init__(self, step: int, saved: int, signal_number: int, why: str):
        self.signal_number = signal_number
        what = (
            "everything is saved" if saved == step else f"saved up to step {saved}: there was no time for another save"
        )
        super().__init__(f"stopped by {why} after step {step}, {what}")


class NoProgress(RuntimeError):
    """Several steps in a row changed nothing; the message says which."""


class Run:
    """Made by hpcrl.run on rank 0. Building it builds the engines of all ranks and restores the newest checkpoint."""

    def __init__(
        self, controller: Controller, layout: RoleLayout, config: Config, run_dir: Path, model_path: Path, attempt: int
    ):
        self.config, self.run_dir = config, run_dir
        self._fence = functools.partial(check_owner, run_dir, attempt)
        self._controller, self._layout = controller, layout
        self.stop_signal = 0
        self.last_step, self._why = config.max_steps, ""
        self.tokenizer = _load_tokenizer(model_path)
        self.trainer = (Trainer if config.learns else IdleTrainer)(controller, layout, config)
        self.reference = Reference(controller, layout, config)
        self.weights = (Weights if config.learns else FixedWeights)(controller, layout)
        self.fabric = Fabric(controller, layout)
        self._build()
        loop = self._make_loop()
        self._data = self._make_data(loop)
        self.evaluation = Evaluation(loop, controller, layout, config, self.tokenizer, run_dir) if loop else None
        self.checkpoint = Checkpoints(controller, layout, config, run_dir, attempt, self._data)
        self.first_step = self.checkpoint.restore()
        controller.between = self.checkpoint.look
        self.metrics = MetricsLog(run_dir, self.checkpoint.restored_step, config.max_steps, config.eval_every)
        rows = read_metrics(run_dir)
        self.last_logged: dict[str, float | None] = rows[-1] if rows else {}
        self._step_started = time.perf_counter()
        self._num_fruitless = 0
        self._deadline = Deadline()
        for row in rows[1:]:
            self._deadline.record((row.get("time/step_total") or 0.0) + (row.get("time/val_step") or 0.0))
        self._told_notice = False

    @property
    def rollouts(self) -> Rollouts | StoredRollouts:
        """The training rollouts of a reinforcement run."""
        assert isinstance(self._data, Rollouts | StoredRollouts), f"pipeline {self.config.pipeline} has no rollouts"
        return self._data

    @property
    def rows(self) -> AnswerRows:
        """The training rows of a supervised run."""
        assert isinstance(self._data, AnswerRows), f"pipeline {self.config.pipeline} has no rows of answers"
        return self._data

    def steps(self) -> Iterator[int]:
        """Steps still to do, from 1; each is trained on weights version step - 1 and publishes version step.

        Stopped, with a checkpoint, after the first boundary at which a signal had come or the job would end before
        another step is trained and saved.
        """
        for step in range(self.first_step + 1, self.config.max_steps + 1):
            self._tell_notice()
            self._fence()
            self._step_started = time.perf_counter()
            yield step
            self._deadline.record(time.perf_counter() - self._step_started)
            if step < self.config.max_steps and (why := self._must_stop()):
                saved = self.checkpoint.save_within(step, self._deadline.left_s())
                raise Stopped(step, saved, self.stop_signal, why)

    def _tell_notice(self) -> None:
        """Say once, as soon as it is known, whether a warning comes early enough."""
        notice = self._deadline.notice(self.checkpoint.expected_save_s(), self.config.cluster.signal_lead_s)
        if notice and not self._told_notice:
            print(f"hpcrl: {notice}", flush=True)
            self._told_notice = True

    def _must_stop(self) -> str:
        """Why no other step is to begin; empty where one is."""
        if self.stop_signal:
            return signal.Signals(self.stop_signal).name
        save_s = self.checkpoint.expected_save_s()
        if self._deadline.is_near(save_s):
            left, needed = self._deadline.left_s(), self._deadline.needed_s(save_s)
            return f"the end of its job in {left:.0f} s (another step with its save takes up to {needed:.0f} s)"
        return ""

    def ask(self, role: str, question: str, **values: Any) -> Stats:
        """What all ranks of a role that answers questions (hpcrl.roles.base.Answers) say, merged."""
        ask = messages.Ask(role, question, values)
        return answers_stats(self._controller.call(dict.fromkeys(self._layout.ranks[role], ask)).values())

    def publish(self, version: int) -> Stats:
        """Give every living replica the trainers' weights under this version."""
        stats = self.weights.publish(version)
        if isinstance(self._data, Rollouts):
            self._data.scheduler.weights_arrived(version)
        return stats

    def evaluate(self, step: int) -> Stats:
        """Held-out scores where they are due at this step (0: before training); nothing otherwise."""
        every = self.config.eval_every
        due = bool(every) and (step % every == 0 or step == self.config.max_steps)
        return self.evaluation.scores(step) if due and self.evaluation is not None else {}

    def end_at(self, step: int, why: str) -> None:
        """The run is complete at this step, before its last one."""
        self.last_step, self._why = step, why

    @property
    def reason(self) -> str:
        """How a run that is complete came to its end."""
        return f"trained {self.last_step} steps" + (f": {self._why}" if self._why else "")

    def log(self, step: int, *parts: Stats) -> None:
        """Write the step's metrics. NoProgress once they show that training has come to nothing; SupersededError, with
        nothing written, when another attempt owns the run."""
        stats = merge([*parts, self.checkpoint.take_stats()])
        flat = flatten({name: value for name, value in stats.items() if not name.startswith("_")})
        evaluated = stats["time/val_step"].total if "time/val_step" in stats else 0.0
        elapsed = time.perf_counter() - self._step_started - evaluated
        tokens = stats["_tokens"].total if "_tokens" in stats else 0.0
        samples = stats["_samples"].total if "_samples" in stats else 0.0
        flat |= {"system/global_step": step, "system/samples": samples, "time/step_total": elapsed}
        if tokens:
            flat["system/tps"] = tokens / elapsed
        self._fence()
        self.metrics.log(step, flat)
        self._check_progress(step, stats)
        self.last_logged = dict(flat)

    def finish(self) -> str:
        """Save, export the policy, draw the plot; returns what to tell the user."""
        last = self.last_step
        self.checkpoint.save(last)
        self.trainer.export(self.run_dir / "hf")
        self.metrics.close()
        plot = draw_plot(self.run_dir)
        examples = self.evaluation.before_and_after(last) if self.evaluation is not None else ""
        told = summary(read_metrics(self.run_dir), self.config.max_steps)
        early = [self.reason] if self._why else []
        return "\n".join([examples, told, *early, f"plot {plot}", f"HF checkpoint {self.run_dir / 'hf'}"])

    def _check_progress(self, step: int, stats: Stats) -> None:
        updates = stats.get("actor/skipped_update")
        losses = {name: stats[name].total / stats[name].count for name in LOSSES if name in stats and stats[name].count}
        signs = [f"{name} is {loss}" for name, loss in losses.items() if not math.isfinite(loss)]
        if updates is not None and updates.total == updates.count:
            signs.append(f"all {updates.count:g} updates were skipped, their gradients were not finite")
        self._num_fruitless = self._num_fruitless + 1 if signs else 0
        if self._num_fruitless == MAX_FRUITLESS_STEPS:
            raise NoProgress(
                f"no progress in steps {step - MAX_FRUITLESS_STEPS + 1} to {step}: {'; '.join(signs)}; lower "
                "trainer.lr or trainer.max_grad_norm and start again from a checkpoint before"
            )

    # -- building ------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Engines and groups, role by role: what joins a default group must be built on all its ranks together."""
        self._controller.await_world()
        for role in sorted(ROLES, key=lambda name: not ROLES[name].owns_default_group):
            ranks = list(self._layout.ranks[role])
            if ranks:
                self._controller.call(dict.fromkeys(ranks, messages.BuildRole(role, ranks)))
        if self._layout.ranks["generator"] or self._layout.ranks["reference"]:
            self.fabric.build()
        self.weights.build_groups()
        self._controller.built = True

    def _make_data(self, loop: RolloutLoop | None) -> Rollouts | StoredRollouts | AnswerRows:
        data, seed = self.config.data, self.config.seed
        if not self.config.reinforces:
            return AnswerRows(self.trainer, self.config, self.tokenizer)
        if not self.config.generates:
            return StoredRollouts(self._controller, self._layout, self.config)
        assert loop is not None, "the layout of a run that generates has generators"
        source = PromptSource(data, "train", self.tokenizer, seed, self.config.rollout.num_prompts)
        replicas = replica_capacity(self.config, self._layout)
        return Rollouts(loop, self.fabric, replicas, self.config, source, self.run_dir, self._fence)

    def _make_loop(self) -> RolloutLoop | None:
        if not self._layout.replicas:
            return None
        ranks, config = self._layout.ranks, self.config
        loop = RolloutLoop(
            self._controller,
            self._layout.replicas,
            ranks["reward"],
            ranks["env"],
            seed=config.seed,
            burst_tokens=config.generator.burst_tokens,
            deterministic=config.deterministic,
            free=[replica[0] for replica in self._layout.free_replicas],
        )
        if config.rollout.max_lag > 0:
            self._controller.background = loop.background
        return loop


def _load_tokenizer(model_path: Path) -> Any:
    """The model's tokenizer. ValueError where the folder has none that works."""
    try:
        return AutoTokenizer.from_pretrained(model_path)
    except Exception as error:  # transformers and tokenizers raise all kinds for a damaged file
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"model.path: config and tokenizer of {model_path} cannot be loaded: {text}") from error
