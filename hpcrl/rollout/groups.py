"""Samples and groups on their way through the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

from hpcrl.rollout.events import Answered, DoneSample, Group, Scored
from hpcrl.rollout.types import FinishReason, make_sample_id


class State(Enum):
    """Where a sample is; the scheduler's docstring tells the way through them."""

    WAITING = 0
    RUNNING = 1
    ACTING = 2
    ANSWERED = 3
    SCORING = 4
    DONE = 5


class LiveSample:
    """A sample the scheduler follows; `replica` is -1 while it waits for its first."""

    __slots__ = ("done", "early", "group", "id", "replica", "state")

    def __init__(self, sample_id: int, group: LiveGroup):
        self.id, self.group, self.state, self.replica = sample_id, group, State.WAITING, -1
        self.early: Scored | Answered | None = None  # arrived before the BurstDone it belongs to
        self.done = DoneSample(sample_id, -1, 0, FinishReason.STOP, 0.0, 0.0)


class LiveGroup:
    """The samples of one attempt at a prompt, started under weights `version`."""

    __slots__ = ("attempt", "cause", "failures", "pending", "samples", "uid", "version")

    def __init__(self, uid: int, attempt: int, failures: int, version: int, size: int):
        self.uid, self.attempt, self.failures, self.version = uid, attempt, failures, version
        self.samples = [LiveSample(make_sample_id(uid, attempt, member), self) for member in range(size)]
        self.pending = size  # samples that are not DONE
        self.cause = ""  # why the group has to start anew

    def frozen(self) -> Group:
        return Group(self.uid, self.attempt, self.version, tuple(sample.done for sample in self.samples))

    def saved(self) -> dict[str, Any]:
        """JSON-able content of a group that is done."""
        return asdict(self.frozen()) | {"failures": self.failures}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], homes: Sequence[int]) -> LiveGroup:
        """The saved group; samples whose replica is not among `homes` are given one together."""
        group = cls(saved["uid"], saved["attempt"], saved["failures"], saved["version"], len(saved["samples"]))
        group.pending = 0
        for sample, done in zip(group.samples, saved["samples"], strict=True):
            sample.replica = done["replica"] if done["replica"] in homes else homes[group.uid % len(homes)]
            reason = FinishReason(done["finish_reason"])
            sample.done = DoneSample(**(done | {"replica": sample.replica, "finish_reason": reason}))
            sample.state = State.DONE
        return group
