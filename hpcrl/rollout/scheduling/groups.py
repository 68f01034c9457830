"""Queued prompts, and the samples and groups that the scheduler tracks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum
from itertools import zip_longest
from typing import Any, NamedTuple

from hpcrl.rollout.scheduling.events import Answered, DoneSample, Group, Played, Rewarded
from hpcrl.rollout.types import GREEDY_MEMBER, FinishReason, make_sample_id, split_sample_id
from hpcrl.spec.trajectory import MAX_REWARD


class State(Enum):
    """A sample's state; hpcrl.rollout.scheduling.samples describes the transitions."""

    WAITING = 0
    RUNNING = 1
    ACTING = 2
    ANSWERED = 3
    SCORING = 4
    DONE = 5


class LiveSample:
    """A sample that the scheduler tracks; `replica` is -1 until it is assigned to one."""

    __slots__ = ("done", "early", "group", "id", "replica", "state", "weight")

    def __init__(self, sample_id: int, group: LiveGroup):
        self.id, self.group, self.state, self.replica = sample_id, group, State.WAITING, -1
        self.weight = 1.0  # its expected length, in units of the mean
        self.early: Rewarded | Answered | Played | None = None  # arrived before the Decoded it belongs to
        self.done = DoneSample(sample_id, -1, 0, FinishReason.STOP, 0.0, 0.0)


class LiveGroup:
    """The samples of one attempt at a prompt, of which `keep` form the group. `version` is the oldest version of its
    tokens; `home` is the replica that cached the prompt's prefix in an earlier attempt. `greedy` is the greedy baseline
    until its reward is in `baseline`; neither `samples` nor `num_done` includes it."""

    __slots__ = (
        *("attempt", "baseline", "cause", "failures", "greedy", "home", "keep", "num_done", "samples", "uid"),
        "version",
    )

    def __init__(self, start: Start, version: int, size: int, keep: int, greedy: bool = False):
        self.uid, self.attempt, self.failures, self.home = start
        self.version, self.keep = version, keep
        self.samples = [LiveSample(make_sample_id(self.uid, self.attempt, member), self) for member in range(size)]
        self.greedy = LiveSample(make_sample_id(self.uid, self.attempt, GREEDY_MEMBER), self) if greedy else None
        self.baseline: float | None = None
        self.num_done = 0
        self.cause = ""  # why the group must restart

    @property
    def everyone(self) -> list[LiveSample]:
        """The samples and the greedy baseline."""
        return self.samples if self.greedy is None else [*self.samples, self.greedy]

    @property
    def is_done_whole(self) -> bool:
        """Whether all samples are done, including redundant ones and the greedy baseline."""
        return self.num_done >= len(self.samples) and self.is_greedy_done

    @property
    def is_greedy_done(self) -> bool:
        """Whether the greedy baseline is done or not needed."""
        return self.greedy is None or self.greedy.state is State.DONE

    @property
    def num_dropped(self) -> int:
        """Number of times the prompt was dropped for causes other than failures."""
        return self.attempt - self.failures

    def next_start(self) -> Start:
        """The next attempt at its prompt."""
        return Start(self.uid, self.attempt + 1, self.failures, self.home)

    def restart(self, sample: LiveSample) -> LiveSample:
        """Replace this sample by the next attempt of the same member, and return the new one."""
        uid, attempt, member = split_sample_id(sample.id)
        fresh = LiveSample(make_sample_id(uid, attempt + 1, member), self)
        if sample is self.greedy:
            self.greedy = fresh
        else:
            self.samples[self.samples.index(sample)] = fresh
        self.attempt = max(self.attempt, attempt + 1)
        return fresh

    def surplus(self) -> list[LiveSample]:
        """The samples beyond `keep`. The group keeps ended samples with the fewest tokens, and failed ones last."""
        ended = [sample for sample in self.samples if sample.state is State.DONE]
        ended.sort(key=lambda sample: (sample.done.failed, sample.done.num_tokens, sample.id))
        kept = {sample.id for sample in ended[: self.keep]}
        return [sample for sample in self.samples if sample.id not in kept]

    def frozen(self) -> Group:
        samples = tuple(sample.done for sample in self.samples)
        return Group(self.uid, self.attempt, self.version, samples, self.baseline)

    def saved(self) -> dict[str, Any]:
        """JSON-able content of a group that is done."""
        saved = asdict(self.frozen()) | {"failures": self.failures}
        for sample in saved["samples"]:
            sample["finish_reason"] = str(sample["finish_reason"])
            sample["token_rewards"] = sample["token_rewards"].hex()
        return saved

    @classmethod
    def restored(cls, saved: Mapping[str, Any], homes: Sequence[int]) -> LiveGroup:
        """The saved group; its samples whose replica is not in `homes` are all assigned to one replica of `homes`."""
        size = len(saved["samples"])
        start = Start(saved["uid"], saved["attempt"], saved["failures"])
        group = cls(start, saved["version"], size, size)
        group.num_done, group.baseline = size, saved.get("baseline")
        for sample, done in zip(group.samples, saved["samples"], strict=True):
            sample.id, sample.state = done["id"], State.DONE
            sample.replica = done["replica"] if done["replica"] in homes else homes[group.uid % len(homes)]
            reason = FinishReason(done["finish_reason"])
            typed = {"replica": sample.replica, "finish_reason": reason}
            typed["turn_rewards"] = tuple(done.get("turn_rewards", ()))
            typed["token_rewards"] = bytes.fromhex(done.get("token_rewards", ""))
            sample.done = DoneSample(**(done | typed))
        return group


def with_score(done: DoneSample, event: Rewarded) -> DoneSample:
    """The sample with a scorer's reward and metrics added to its environment's; non-finite numbers are errors."""
    reward, score, error, turns = done.reward + event.reward, event.score, event.error, event.turn_rewards
    if done.turn_rewards and not turns:
        turns = (*[0.0] * (len(done.turn_rewards) - 1), event.reward)
    turns = tuple(sum(pair) for pair in zip_longest(done.turn_rewards, turns, fillvalue=0.0))
    tokens = event.token_rewards
    if not all(abs(number) <= MAX_REWARD for number in (reward, score, *turns)):
        error = error or f"reward {reward} and score {score} are not both finite and below {MAX_REWARD:g}"
        reward, score, turns, tokens = 0.0, 0.0, (), b""
    scored = replace(done, reward=reward, score=score, error=error, turn_rewards=turns, token_rewards=tokens)
    told = {**done.metrics, **event.metrics}
    return replace(scored, metrics=told, failed=event.failed, extracted=event.extracted)


class Start(NamedTuple):
    """A prompt to start. `failures` counts attempts that ended with an error; `home` is the replica with its prefix."""

    uid: int
    attempt: int = 0
    failures: int = 0
    home: int | None = None


class PromptQueue:
    """Prompts ordered by uid, so a restarted prompt precedes all newer prompts."""

    def __init__(self) -> None:
        self.newest_uid = -1
        self._heap: list[Start] = []  # uids differ

    def __len__(self) -> int:
        return len(self._heap)

    def add_prompts(self, uids: Iterable[int]) -> None:
        """Add fresh prompts; uids rise over all calls."""
        for uid in uids:
            if uid <= self.newest_uid:
                raise ValueError(f"prompt {uid} comes after prompt {self.newest_uid}; uids must rise")
            self.newest_uid = uid
            heapq.heappush(self._heap, Start(uid))

    def put_back(self, start: Start) -> None:
        heapq.heappush(self._heap, start)

    def pop(self) -> Start:
        """The oldest prompt."""
        return heapq.heappop(self._heap)

    def saved(self) -> list[list[int]]:
        """[uid, attempt, failures] of all, JSON-able."""
        return [[start.uid, start.attempt, start.failures] for start in self._heap]

    def restore(self, newest_uid: int, saved: Iterable[Sequence[int]]) -> None:
        assert self.newest_uid == -1, "restore is for a new queue"
        self.newest_uid = newest_uid
        for uid, attempt, failures in saved:
            self.put_back(Start(uid, attempt, failures))
