"""Responses of a run without trainers to any prompts of data.train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.controller.generation import replica_capacity, training_sampling
from hpcrl.controller.responses import PromptAnswer, whole_rows
from hpcrl.data import PromptSource
from hpcrl.data.source import RowOrigin
from hpcrl.data.written_turns import WrittenTurns
from hpcrl.messaging.dispatcher import Controller
from hpcrl.metrics.responses import by_prompt
from hpcrl.rollout.loop import RolloutLoop
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutScheduler
from hpcrl.rollout.types import Prompt


class Responder:
    """Generates and scores responses as in training, without keeping them for a trainer. `source` has the prompts,
    `turns` writes the model's turns as messages."""

    def __init__(
        self,
        loop: RolloutLoop,
        controller: Controller,
        layout: RoleLayout,
        config: Config,
        source: PromptSource,
        turns: WrittenTurns,
    ):
        self._loop, self._controller, self._config, self.source, self.turns = loop, controller, config, source, turns
        self._slots = replica_capacity(config, layout)

    @property
    def num_slots(self) -> int:
        """Responses that all living replicas generate at the same time."""
        return sum(self._living().values())

    def _living(self) -> dict[int, int]:
        return {rank: slots for rank, slots in self._slots.items() if rank not in self._controller.lost}

    def respond(self, prompts: Sequence[Prompt], samples: int) -> Mapping[int, Sequence[Mapping[str, Any]]]:
        """Row of a prompt -> its `samples` responses (hpcrl.metrics.responses), without prompts some of whose responses
        were on a replica that is lost meanwhile. A prompt has the same seeds in every call. Errors as in
        RolloutLoop.collect()."""
        # Every prompt counts once; a response whose reward failed has an error.
        deterministic = self._config.deterministic
        settings = SchedulerConfig(group_size=samples, deterministic=deterministic, accept_errors=True)
        scheduler = RolloutScheduler(settings, self._living())
        scheduler.begin_step(0, len(prompts))
        known = {prompt.uid: prompt for prompt in prompts}
        waiting = iter(prompts)
        collected = self._loop.collect(
            scheduler, {}, lambda count: list(islice(waiting, count)), training_sampling(self._config)
        )
        answers = []
        for group in collected.groups:
            sizes, prompt = [collected.sizes[sample.id] for sample in group.samples], known[group.uid]
            answers.append(PromptAnswer(prompt, group, sizes, RowOrigin("", prompt.row)))
        rows = whole_rows(self._controller, self._config, answers)
        self._loop.forget(collected.groups)
        return {row: own for (_, row), own in by_prompt(rows).items() if len(own) == samples}
