"""Training rollouts: from prompts to batches on the trainer ranks, with an outcome for every prompt."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.clients import RolloutTransfer, Trainer, timed
from hpcrl.controller.generation import training_sampling
from hpcrl.data import PromptSource
from hpcrl.metrics.stats import Stat, Stats, merge, scalar
from hpcrl.rollout.loop import CollectedRollouts, PendingPrompt, RolloutLoop
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutExhausted, RolloutScheduler
from hpcrl.rollout.store import OutcomeRecord, write_outcomes
from hpcrl.rollout.types import Prompt, PromptOutcome, Sizes
from hpcrl.system.files import step_name

logger = logging.getLogger(__name__)


class Rollouts:
    """The stream of batches; every checkpoint contains its state."""

    def __init__(
        self,
        loop: RolloutLoop,
        transfer_group: RolloutTransfer,
        replicas: Mapping[int, int],
        config: Config,
        source: PromptSource,
        run_dir: Path,
        fence: Callable[[], None],
    ):
        """`replicas` comes from replica_capacity(); `fence` raises if another attempt owns the run."""
        self._loop, self._fabric, self._config = loop, transfer_group, config
        self.source, self._folder = source, run_dir / "rollouts"
        self._fence = fence
        self._prompts: dict[int, Prompt] = {}
        self.scheduler = RolloutScheduler(SchedulerConfig.of(config), replicas, lambda uid: self._prompts[uid].domain)
        self._records: list[OutcomeRecord] = []
        self._told_failed = False
        self.stats: Stats = {}

    def next(self, step: int) -> BatchHandle:
        """This step's batch: generated, rewarded, filtered, transferred; repeated if a replica that holds some of its
        samples is lost."""
        config, parts = self._config, []
        self.scheduler.begin_step(step - 1, config.rollout.num_prompts)
        sampling, handle = training_sampling(config), None
        while handle is None:
            start = time.perf_counter()
            try:
                collected = self._loop.collect(self.scheduler, self._prompts, self._draw, sampling)
            except RolloutExhausted as error:
                self._replace_lost()
                raise RolloutExhausted(f"{error}{_missing(self.source.owed)}") from None
            parts += [collected.stats, timed("time/step_generate", start)]
            start = time.perf_counter()
            handle = self._fabric.transfer_rollouts(
                config, step, collected, sampling.truncates, self._decoupled(collected)
            )
            parts.append(timed("time/step_rollout_transfer", start))
            if handle is None:
                self.scheduler.return_batch()
                self._loop.restore_sizes(collected.groups, collected.sizes)
        for uid in sorted(set(handle.prompts.values())):
            handle.domains.setdefault(self._prompts[uid].domain, []).append(uid)
            if self._prompts[uid].teacher_ids:
                handle.teacher_prompts[uid] = self._prompts[uid].teacher_ids
        self._loop.forget(collected.groups)
        self._loop.background([])  # after the rollout transfer, which decode chunks would delay
        recorded = len(self._records)
        self._record()
        if (timeline := self._loop.timeline) is not None:
            for group in collected.groups:
                timeline.closed((sample.id for sample in group.samples), "trained", step - 1 - group.version)
            for record in self._records[recorded:]:
                timeline.prompt_ended(record.uid, record.outcome)
        total = sum(size.total for size in collected.sizes.values())
        scheduled = {name: Stat(*value) for name, value in self.scheduler.metrics().items()}
        ended = {f"prompts/{name}": scalar(n) for name, n in self.source.ledger.counts().items()}
        counted = {"_tokens": scalar(total), "_samples": scalar(len(collected.sizes))}
        self.stats = merge([*parts, scheduled, counted, ended])
        return handle

    def _decoupled(self, collected: CollectedRollouts) -> dict[int, float]:
        """Sample -> its decoupled reward, if the algorithm reads them."""
        found: dict[int, float] = {}
        if (decoupling := self.scheduler.config.decoupling) is not None:
            for group in collected.groups:
                values = decoupling.rewards(self._prompts[group.uid].domain, group.samples)
                found |= zip((sample.id for sample in group.samples), values, strict=True)
        return found

    def pending(self) -> list[PendingPrompt]:
        """The started prompts whose groups are incomplete, also of validation, oldest first."""
        return self._loop.pending()

    def store(self, batch: BatchHandle, trainer: Trainer) -> None:
        """Write the step's rollouts and its prompts' outcomes if rollout.save_rollouts. Raises before writing if
        another attempt owns the run."""
        if not self._config.rollout.save_rollouts:
            self._records.clear()
            return
        self._fence()
        folder = self._folder / step_name(batch.step)
        folder.mkdir(parents=True, exist_ok=True)
        finish = trainer.write_rollouts(batch, folder, {"step": batch.step, "weight_version": batch.step - 1})
        write_outcomes(folder, self._records)
        finish()
        self._records.clear()

    def state_dict(self) -> dict[str, Any]:
        """Cursor, ledger of prompts and scheduler; JSON-able. A lost replica's samples are generated again."""
        self._loop.tell_lost()
        self._replace_lost()
        sizes = self._loop.sizes(self.scheduler.finished())
        waiting = {"sizes": [[sample, *astuple(size)] for sample, size in sizes.items()]}
        return {"cursor": self.source.state_dict(), "scheduler": self.scheduler.state_dict() | waiting}

    def held(self) -> dict[int, list[int]]:
        """Replica -> its samples in valid groups that wait to be taken."""
        held: dict[int, list[int]] = {}
        for group in self.scheduler.finished():
            for sample in group.samples:
                held.setdefault(sample.replica, []).append(sample.id)
        return held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Open prompts, including prompts of finished groups, are read again from their rows."""
        self.source.load_state_dict(state["cursor"])
        self.scheduler.load_state_dict(state["scheduler"])
        sizes = {sample: Sizes(*size) for sample, *size in state["scheduler"].get("sizes", [])}
        self._loop.restore_sizes(self.scheduler.finished(), sizes)
        self._prompts = {uid: self.source.prompt(uid) for uid in self.source.ledger.open_uids}
        if self._loop.timeline is not None:
            held = [(s, group.uid) for group in self.scheduler.finished() for s in group.samples]
            self._loop.timeline.restored(
                ((uid, prompt.domain) for uid, prompt in self._prompts.items()),
                ((sample.id, uid, sample.replica, sample.num_tokens) for sample, uid in held),
            )

    def _draw(self, count: int) -> list[Prompt]:
        self._replace_lost()
        return [self.source.next() for _ in range(count)]

    def _replace_lost(self) -> None:
        """Replace prompts that were filtered or have failed with new prompts from their domains."""
        for uid in self.scheduler.lost():
            self.source.replace(self._prompts[uid].domain)

    def _record(self) -> None:
        """Record the outcome of every prompt that ended in this step."""
        self._replace_lost()
        for end in self.scheduler.ended_prompts():
            domain = self.source.ledger.close_prompt(end.uid, end.outcome, end.reason).domain
            del self._prompts[end.uid]
            ended = end.uid, end.attempt, end.outcome, end.reason
            self._records.append(OutcomeRecord(*ended, domain, end.rewards, end.metrics))
        for left_out in self.source.take_dropped():
            told = left_out.uid, 0, left_out.outcome, left_out.reason, left_out.domain
            self._records.append(OutcomeRecord(*told))
            if left_out.outcome is PromptOutcome.FAILED and not self._told_failed:
                self._told_failed = True
                logger.warning("a row is left out: %s; further ones are counted in prompts/failed", left_out.reason)


def _missing(owed: Mapping[str, int]) -> str:
    """Which domains lack prompts, for a batch with fixed shares of domains."""
    counts = ", ".join(f"{domain} {count}" for domain, count in owed.items())
    return f"; prompts missing by domain (data.domain_interleave_probs): {counts}" if counts else ""
