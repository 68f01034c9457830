"""Training rollouts: prompts in, a batch on the trainer ranks out; what became of every prompt is recorded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.data import PromptSource
from hpcrl.dist.controller import Controller
from hpcrl.dist.messages import Sampling
from hpcrl.files import step_name
from hpcrl.layout import RoleLayout
from hpcrl.pipelines.batches import BatchHandle
from hpcrl.pipelines.parts import Trainer, hand_over, timed
from hpcrl.rollout.events import Group
from hpcrl.rollout.loop import RolloutLoop
from hpcrl.rollout.policies import SchedulerConfig
from hpcrl.rollout.scheduler import RolloutScheduler
from hpcrl.rollout.store import DispositionRecord, write_dispositions
from hpcrl.rollout.types import Prompt
from hpcrl.stats import Stat, Stats, merge, scalar


def make_sampling(config: Config, temperature: float, max_new_tokens: int, truncate: bool = True) -> Sampling:
    """How to sample; evaluation leaves truncation out."""
    r = config.rollout
    top_p, top_k, min_p = (r.top_p, r.top_k, r.min_p) if truncate else (1.0, 0, 0.0)
    return Sampling(max_new_tokens, temperature, top_p, top_k, min_p, list(r.stop))


def replica_capacity(config: Config, layout: RoleLayout) -> dict[int, int]:
    """First rank of each replica -> requests it is given at once: twice its slots, so that none waits for work."""
    return {replica[0]: 2 * config.generator.max_slots for replica in layout.replicas}


class Rollouts:
    """The stream of batches; its state goes into every checkpoint."""

    def __init__(
        self,
        loop: RolloutLoop,
        controller: Controller,
        layout: RoleLayout,
        config: Config,
        source: PromptSource,
        run_dir: Path,
    ):
        self._loop, self._controller, self._layout, self._config = loop, controller, layout, config
        self.source, self._folder = source, run_dir / "rollouts"
        self.scheduler = RolloutScheduler(SchedulerConfig.of(config), replica_capacity(config, layout))
        self._prompts: dict[int, Prompt] = {}
        self._records: list[DispositionRecord] = []
        self.stats: Stats = {}

    def next(self, step: int) -> BatchHandle:
        """The batch of this step, generated, rewarded, filtered and handed over."""
        start, config = time.perf_counter(), self._config
        self.scheduler.begin_step(step - 1, config.rollout.num_prompts)
        sampling = make_sampling(config, config.rollout.temperature, config.rollout.max_new_tokens)
        harvest = self._loop.drive(self.scheduler, self._prompts, self._draw, sampling, config.env is not None)
        generated = timed("time/step_generate", start)
        handle = hand_over(self._controller, self._layout, config, step, harvest.groups, harvest.sizes)
        self._loop.forget(harvest.groups)
        self._record(harvest.groups)
        total = sum(size.total for size in harvest.sizes.values())
        scheduled = {name: Stat(*value) for name, value in self.scheduler.metrics().items()}
        ended = {f"prompts/{name}": scalar(n) for name, n in self.source.dispositions.counts().items()}
        counted = {"_tokens": scalar(total), "_samples": scalar(len(harvest.sizes))}
        self.stats = merge([generated, harvest.stats, scheduled, counted, ended])
        return handle

    def store(self, batch: BatchHandle, trainer: Trainer) -> None:
        """Write the step's rollouts and what became of its prompts."""
        if not self._config.rollout.save_rollouts:
            self._records.clear()
            return
        folder = self._folder / step_name(batch.step)
        folder.mkdir(parents=True, exist_ok=True)
        finish = trainer.write_rollouts(batch, folder, {"step": batch.step, "weight_version": batch.step - 1})
        write_dispositions(folder, self._records)
        finish()
        self._records.clear()

    def state_dict(self) -> dict[str, Any]:
        """Cursor, ledger of prompts and scheduler; JSON-able."""
        return {"cursor": self.source.state_dict(), "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore. Prompts that were in flight are drawn again from their rows."""
        self.source.load_state_dict(state["cursor"])
        self.scheduler.load_state_dict(state["scheduler"])
        for uid, *_ in state["scheduler"]["queue"]:
            self._prompts[uid] = self.source.prompt(uid)

    def _draw(self, count: int) -> list[Prompt]:
        return [self.source.next() for _ in range(count)]

    def _record(self, groups: list[Group]) -> None:
        """Keep what became of every prompt that ended in this step, over-long ones too."""
        rewards = {group.uid: tuple(sample.reward for sample in group.samples) for group in groups}
        ended = [(self.source.dispositions.settle(e.uid, e.disposition, e.reason), e) for e in self.scheduler.settled()]
        for record, _ in ended:
            del self._prompts[record.uid]
        everything = [*((record, e.attempt) for record, e in ended), *((s, 0) for s in self.source.take_dropped())]
        self._records += [
            DispositionRecord(s.uid, attempt, s.disposition, s.reason, s.domain, rewards.get(s.uid, ()))
            for s, attempt in everything
        ]
