"""The reference's interface for pipelines: the frozen model of the KL terms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.clients import Trainer, fill_logprobs, send_tokens
from hpcrl.controller.policy_copy import PolicyCopy
from hpcrl.messaging import messages
from hpcrl.messaging.dispatcher import Controller
from hpcrl.metrics.stats import Stats


class Reference:
    """The reference ranks: the frozen initial policy, the policy at the last reference update
    (algorithm.ref_update_steps), or the model in reference.path. With trainer.lora and no such path, the trainer ranks
    without their adapters. Does nothing if neither algorithm nor pipeline uses a reference."""

    def __init__(self, controller: Controller, layout: RoleLayout, config: Config, run_dir: Path):
        self._controller, self._config = controller, config
        role = "trainer" if config.uses_reference and not layout.ranks["reference"] else "reference"
        self.ranks = layout.ranks[role]
        self._division, self._trainers = layout.division(role), layout.division("trainer")
        self._copy = PolicyCopy(run_dir, "reference", self._load)

    def logprobs(self, batch: BatchHandle, into: str) -> Stats:
        """Fill a token field with the reference's log-probs."""
        if not self.ranks:
            return {}
        rows = batch.rows_of("reference")
        stats = fill_logprobs(self._controller, self._config, "reference", self._division, batch, rows, into)
        if self.ranks != self._trainers.ranks:
            send_tokens(self._controller, batch, into, ("reference", self._division), ("trainer", self._trainers))
        return stats

    def fill(self, first_step: int) -> Iterator[int]:
        """Nothing: log-probs are computed in the steps. See CachedReference."""
        yield from ()

    def update(self, step: int, trainer: Trainer) -> Stats:
        """If due, export this step's policy in HF layout and load it as the reference; a resumed run loads the same
        export."""
        every = self._config.algorithm.ref_update_steps if self.ranks else None
        return {} if every is None or step % every else self._copy.update(step, trainer)

    def state_dict(self) -> dict[str, Any]:
        """The step whose policy is the reference; JSON-able."""
        return self._copy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. ValueError if the reference's folder is gone."""
        if self.ranks:
            self._copy.load_state_dict(state)

    def _load(self, folder: Path) -> None:
        load, more_s = messages.LoadReference(str(folder)), self._config.timeouts.start_s
        self._controller.call(dict.fromkeys(self.ranks, load), more_s)
