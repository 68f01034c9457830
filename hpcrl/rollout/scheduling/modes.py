"""The two modes of the scheduler: when prompts start, where samples run, and when verdicts are given.

StreamingMode, the default, uses every free slot. DeterministicMode (deterministic=true) decides by sample ids and
outcomes only, so commands and batches never depend on the order of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from hpcrl.rollout.scheduling.groups import LiveGroup, LiveSample
from hpcrl.rollout.scheduling.policies import Lengths, SchedulerConfig
from hpcrl.rollout.scheduling.replicas import Replica, Replicas, Waiting


class Mode(Protocol):
    """A mode's decisions. Callers handle each item of route() and turns() before the next, which may depend on it."""

    decides_at_once: bool
    """Whether a group gets its verdict as soon as possible, instead of through next_decided()."""

    def may_start(self, num_open: int) -> bool:
        """Whether groups may be started while this many have no verdict."""
        ...

    def started(self, uids: Sequence[int]) -> None:
        """Record that these groups are started, in this order."""
        ...

    def next_decided(self, open_groups: Mapping[int, LiveGroup]) -> LiveGroup | None:
        """The group that gets its verdict now; None if there is none."""
        ...

    def observe(self, sample: LiveSample) -> None:
        """Record a sample that is done."""
        ...

    def route(self, waiting: Waiting, replicas: Replicas) -> Iterator[tuple[LiveSample, int]]:
        """Waiting samples, each with the replica that generates it; removes them from `waiting`."""
        ...

    def turns(self, replica: Replica) -> Iterator[int]:
        """Answered samples of a replica that continue now; removes them from its answered samples."""
        ...


class StreamingMode:
    """Samples go to the least loaded replica, group members together if there is room and the policy requires it. A
    group gets its verdict when its first group_size members are done.

    `kind_of` returns the class of a prompt (its domain). Responses to prompts of one class have similar lengths.
    """

    decides_at_once = True

    def __init__(self, config: SchedulerConfig, kind_of: Callable[[int], str]):
        self._together, self._by_length = config.group_affinity, config.routing == "expected_length"
        self._kind_of, self._lengths = kind_of, Lengths()

    def may_start(self, num_open: int) -> bool:
        return True

    def started(self, uids: Sequence[int]) -> None:
        pass

    def next_decided(self, open_groups: Mapping[int, LiveGroup]) -> LiveGroup | None:
        return None

    def observe(self, sample: LiveSample) -> None:
        if self._by_length:
            self._lengths.observe(self._kind_of(sample.group.uid), sample.done.num_tokens)

    def route(self, waiting: Waiting, replicas: Replicas) -> Iterator[tuple[LiveSample, int]]:
        while (head := waiting.head()) is not None:
            name = replicas.lightest()
            if name is None:
                return
            home, group = head.group.home, head.group
            if home is not None and home in replicas and replicas[home].room > 0:
                name = home
            if self._by_length:
                weight = self._lengths.expected(self._kind_of(group.uid))
            for _ in range(replicas[name].room if self._together else 1):
                sample = waiting.pop()
                if self._by_length:
                    sample.weight = weight
                yield sample, name
                following = waiting.head()
                if following is None or following.group is not group:
                    break

    def turns(self, replica: Replica) -> Iterator[int]:
        """In order of arrival, as far as there is room."""
        while replica.answered and replica.room > 0:
            yield replica.answered.popleft()


class DeterministicMode:
    """Distributes a batch of groups over the replicas by sample id, all at once; engines queue samples beyond their
    slots. The next batch starts when every group of this one has its verdict. Verdicts are in order of uid. A replica's
    samples take their next turn together."""

    decides_at_once = False

    def __init__(self) -> None:
        self._uids: deque[int] = deque()  # the batch's groups without a verdict, in order

    def may_start(self, num_open: int) -> bool:
        return not num_open

    def started(self, uids: Sequence[int]) -> None:
        if uids:
            self._uids = deque(uids)

    def next_decided(self, open_groups: Mapping[int, LiveGroup]) -> LiveGroup | None:
        while self._uids:
            group = open_groups.get(self._uids[0])
            if group is not None and not (group.cause or group.is_done_whole):
                return None
            self._uids.popleft()
            if group is not None:
                return group
        return None

    def observe(self, sample: LiveSample) -> None:
        pass

    def route(self, waiting: Waiting, replicas: Replicas) -> Iterator[tuple[LiveSample, int]]:
        """In equal contiguous ranges of sample ids."""
        samples = []
        while waiting.head() is not None:
            samples.append(waiting.pop())
        names = list(replicas)
        for i, sample in enumerate(samples):
            yield sample, names[i * len(names) // len(samples)]

    def turns(self, replica: Replica) -> Iterator[int]:
        """In order of id, once none of the replica's samples decodes or is with its environment."""
        if replica.running or replica.acting:
            return
        complete_groups = sorted(replica.answered)
        replica.answered.clear()
        yield from complete_groups
