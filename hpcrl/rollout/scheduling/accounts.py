"""The scheduler's accounts: how prompts ended, and a step's counts and values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hpcrl.rollout.scheduling.events import EndedPrompt
from hpcrl.rollout.scheduling.groups import LiveGroup
from hpcrl.rollout.scheduling.replicas import Replicas
from hpcrl.rollout.types import PromptOutcome

COUNTS = (
    "group_filter_count",
    "query_use_count",
    "aborted",
    "cancelled",
    "restarted",
    "redundant",
    "failed",
    "score_errors",
    "late_events",
)
"""Counts that are reported even when they are 0."""
FILTERS = ("filtered_mean_low", "filtered_mean_high", "filtered_std")


class Accounts:
    """Values are dropped once they are reported. `tally` has the counts and values since the last metrics()."""

    def __init__(self) -> None:
        self.tally = Tally(COUNTS)
        self._ended: list[EndedPrompt] = []
        self._lost: list[int] = []  # prompts that ended without being trained
        self._taken: list[LiveGroup] = []  # the last batch, which may still be given back
        self._staleness_from = -1  # the version that this batch trains
        self._before: dict[str, int] = {}  # counts when the step was opened

    def open_step(self, replicas: Replicas) -> None:
        """Start a step: the previous batch can no longer be given back."""
        self._count_batch(replicas)
        self._before = self.tally.counts()

    def close_prompt(self, group: LiveGroup, outcome: PromptOutcome, reason: str = "") -> None:
        """Record the end of the group's prompt."""
        scored = [] if outcome is PromptOutcome.FAILED else group.samples
        rewards = tuple(sample.done.reward for sample in scored)
        metrics = tuple(sample.done.metrics for sample in scored)
        self._ended.append(EndedPrompt(group.uid, group.attempt, outcome, reason, rewards, metrics))
        if outcome is not PromptOutcome.TRAINED:
            self._lost.append(group.uid)

    def take_batch(self, batch: list[LiveGroup], version: int) -> None:
        """Take the batch for training this version: its prompts are closed as trained."""
        self._taken, self._staleness_from = batch, version
        for group in batch:
            self.close_prompt(group, PromptOutcome.TRAINED)

    def return_batch(self) -> list[LiveGroup]:
        """Undo the last take_batch(); returns its batch."""
        taken, self._taken = self._taken, []
        uids = {group.uid for group in taken}
        self._ended = [end for end in self._ended if end.uid not in uids]
        return taken

    def lost(self) -> list[int]:
        """Prompts that ended without being trained since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def ended_prompts(self) -> list[EndedPrompt]:
        """Prompts that ended since the last call."""
        ended_prompts, self._ended = self._ended, []
        return ended_prompts

    def metrics(self, replicas: Replicas) -> dict[str, tuple[float, float, float, float]]:
        """(sum, count, min, max) by name since the last call."""
        self._count_batch(replicas)
        self._before = {}
        return self.tally.take("scheduler/")

    def _num_lost(self, name: str) -> int:
        """Number of this step's groups that were lost for this cause."""
        return self.tally.counted(name) - self._before.get(name, 0)

    def remedy(self, limit: int) -> str:
        """Advice for the user about a step that lost too many of its at most `limit` groups."""
        if not any(map(self._num_lost, FILTERS)):
            return "every one failed; mend what the last error names"
        return f"relax rollout.filter_* or raise rollout.max_generated_groups ({limit})"

    def losses(self) -> str:
        """Counts of this step's lost groups by cause."""
        counts = ", ".join(f"{name} {self._num_lost(name)}" for name in (*FILTERS, "failed"))
        last = [f", the last by {s.reason}" for s in self._ended if s.outcome is PromptOutcome.FAILED][-1:]
        return f"{counts}{''.join(last)}"

    def saved(self) -> list[dict[str, Any]]:
        """The ends that ended_prompts() has not returned yet, JSON-able."""
        return [end.saved() for end in self._ended]

    def restore(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Continue from the result of saved()."""
        self._ended = [EndedPrompt.restored(end) for end in saved]

    def _count_batch(self, replicas: Replicas) -> None:
        """Record the last batch: its staleness, response lengths, and distribution over the replicas."""
        taken, self._taken = self._taken, []
        if not taken:
            return
        tokens = dict.fromkeys(replicas, 0)
        for group in taken:
            staleness = self._staleness_from - group.version
            self.tally.record("staleness/*", staleness)
            self.tally.record("off_policy_ratio", float(staleness > 0))
            self.tally.record("replicas_per_group", len({sample.replica for sample in group.samples}))
            for sample in group.samples:
                self.tally.record("kept_length", sample.done.num_tokens)
                if group.num_dropped:
                    self.tally.record("kept_length_retried", sample.done.num_tokens)
                tokens[sample.replica] = tokens.get(sample.replica, 0) + sample.done.num_tokens
        for count in tokens.values():
            self.tally.record("replica_tokens/*", count)
        for replica in replicas.values():
            self.tally.record("replica_speed/*", replica.speed)


class Tally:
    """`names` are counts that are reported even when they are 0."""

    def __init__(self, names: Iterable[str]):
        self._names = tuple(names)
        self._values: dict[str, tuple[float, float, float, float]] = {}
        self._counts = dict.fromkeys(self._names, 0)

    def count(self, name: str, number: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + number

    def counted(self, name: str) -> int:
        return self._counts.get(name, 0)

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def record(self, name: str, value: float) -> None:
        total, count, low, high = self._values.get(name, (0.0, 0.0, math.inf, -math.inf))
        self._values[name] = (total + value, count + 1.0, min(low, value), max(high, value))

    def take(self, prefix: str) -> dict[str, tuple[float, float, float, float]]:
        """Return everything so far under prefix + name, and reset."""
        taken = {prefix + name: (float(n), 1.0, float(n), float(n)) for name, n in self._counts.items()}
        taken |= {prefix + name: value for name, value in self._values.items()}
        self._values, self._counts = {}, dict.fromkeys(self._names, 0)
        return taken
