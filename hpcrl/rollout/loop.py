"""The loop that drives a rollout scheduler over the real generator, reward and env ranks."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpcrl.dist import messages
from hpcrl.dist.controller import Controller
from hpcrl.rollout import events
from hpcrl.rollout.scheduler import RolloutScheduler
from hpcrl.rollout.types import FinishReason, Prompt, sampling_seed, split_sample_id
from hpcrl.stats import Stat, Stats, merge, scalar

BURSTS_AHEAD = 2
PAYLOAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """Tokens of a finished sample: with its prompt and observations, and of the model alone."""

    total: int
    model: int


@dataclass
class Harvest:
    """What a drive gave: the scheduler's groups, the sizes of their samples, and statistics."""

    groups: list[events.Group]
    sizes: dict[int, Sizes]
    stats: Stats = field(default_factory=dict)


class RolloutLoop:
    """Carries out a scheduler's commands. Two bursts are queued ahead at every replica that has work.

    In deterministic mode all replicas run burst by burst together, and events reach the scheduler sorted, once all of
    a burst's responses are scored: what is generated is then a function of the sequence of commands alone.
    """

    def __init__(
        self,
        controller: Controller,
        replicas: Mapping[int, int],
        scorers: Sequence[int],
        envs: Sequence[int],
        *,
        seed: int,
        burst_tokens: int,
        deterministic: bool,
    ):
        self._controller, self._seed, self._burst_tokens, self._deterministic = (
            controller,
            seed,
            burst_tokens,
            deterministic,
        )
        self._replicas, self._scorers, self._envs = dict(replicas), list(scorers), list(envs)
        self._live: Counter[int] = Counter()  # samples a replica decodes or queues
        self._bursts: Counter[int] = Counter()  # bursts on their way
        self._reached: dict[int, int] = {}  # sample with a scorer or environment -> that rank
        self._waiting: Counter[int] = Counter()  # of these, the number per rank
        self._early: set[int] = set()  # samples whose answer overtook the BurstDone they ended in
        self._receivers: dict[tuple[int, int], list[int]] = {}  # (replica, burst) -> whom it was told to send to
        self._dropped: dict[tuple[int, int], list[int]] = {}  # (replica, abort) -> samples it was told to drop
        self._heard: dict[int, float] = {}  # scorer or env rank -> when it last showed that it works
        self._sizes: dict[int, Sizes] = {}  # of ended samples that were neither taken nor dropped
        self._stats: list[Stats] = []

    def drive(
        self,
        scheduler: RolloutScheduler,
        prompts: dict[int, Prompt],
        draw: Callable[[int], list[Prompt]],
        sampling: messages.Sampling,
    ) -> Harvest:
        """Run until the scheduler's batch is ready and take it. `prompts` (uid -> prompt) gains what is drawn.

        The trained samples stay on their replicas until they are handed over or forgotten. RolloutExhausted when the
        step can get no batch; RankFailed and RankSilent as the controller raises them.
        """
        self._stats = []
        arrived: list[events.Event] = []
        while True:
            fresh = draw(scheduler.wants())
            prompts.update((prompt.uid, prompt) for prompt in fresh)
            scheduler.offer(prompt.uid for prompt in fresh)
            commands = scheduler.plan(arrived)
            for command in commands:
                self._carry_out(command, prompts, sampling)
            if scheduler.ready():
                break
            self._keep_busy()
            if any(self._bursts.values()) or self._reached:
                arrived = self._collect(prompts)
            elif arrived or fresh or commands:
                arrived = []  # the scheduler may want other prompts now
            else:
                raise scheduler.exhausted("no response is on its way and no prompt is left to draw")
        scheduler.plan(self._settle_down(prompts))  # the batch stands: this only counts what was aborted
        groups = scheduler.take()
        sizes = {sample.id: self._sizes.pop(sample.id) for group in groups for sample in group.samples}
        self._early.clear()  # no burst is on its way that could still tell of them
        return Harvest(groups, sizes, merge(self._stats))

    def forget(self, groups: Sequence[events.Group]) -> None:
        """Let the replicas drop the groups' samples."""
        held: dict[int, list[int]] = {}
        for group in groups:
            for sample in group.samples:
                held.setdefault(sample.replica, []).append(sample.id)
        for replica, samples in held.items():
            self._controller.send(replica, messages.Forget(samples))

    # -- commands ------------------------------------------------------------------------------------------------

    def _carry_out(self, command: events.Command, prompts: Mapping[int, Prompt], sampling: messages.Sampling) -> None:
        replica, samples = command.replica, list(command.sample_ids)
        match command:
            case events.Admit() | events.Continue():
                self._live[replica] += len(samples)
                known = isinstance(command, events.Continue)
                for message in _admissions(samples, {} if known else prompts, sampling, self._seed):
                    self._controller.send(replica, message)
            case events.Rescore():
                receivers = self._receivers_of(replica)
                self._reach(samples, receivers)
                self._controller.send(replica, messages.Rescore(samples, receivers))
            case events.Drop():
                self._bursts[replica] += 1  # answered like a burst
                seq = self._controller.send(replica, messages.AbortSamples(samples))
                self._dropped[replica, seq] = samples

    def _keep_busy(self) -> None:
        ahead = 1 if self._deterministic else BURSTS_AHEAD
        for replica in self._replicas:
            receivers = self._receivers_of(replica)
            while self._live[replica] > 0 and self._bursts[replica] < ahead and replica not in self._controller.lost:
                seq = self._controller.send(replica, messages.Burst(self._burst_tokens, receivers))
                self._receivers[replica, seq] = receivers
                self._bursts[replica] += 1

    def _settle_down(self, prompts: Mapping[int, Prompt]) -> list[events.Event]:
        """Wait for the bursts that are still on their way, so that a step ends with silent replicas; what they said."""
        late: list[events.Event] = []
        while any(self._bursts[r] > 0 for r in self._replicas if r not in self._controller.lost):
            for rank, event in self._controller.events():
                late.extend(self._translate(rank, event, prompts))
        return late

    def _receivers_of(self, replica: int) -> list[int]:
        """The environments or scorers that get this replica's responses: itself where all of them generate, as mail
        would only cost time and each has as many."""
        alive = [rank for rank in self._envs or self._scorers if rank not in self._controller.lost]
        return [replica] if replica in alive and self._replicas.keys() >= set(alive) else alive

    def _reach(self, samples: Sequence[int], receivers: Sequence[int]) -> None:
        for sample in samples:
            receiver = self._reached[sample] = receivers[split_sample_id(sample)[0] % len(receivers)]
            if not self._waiting[receiver]:
                self._heard[receiver] = time.monotonic()
            self._waiting[receiver] += 1

    def _leave(self, sample: int) -> bool:
        """The sample is with its scorer or environment no more; whether it was."""
        receiver = self._reached.pop(sample, None)
        if receiver is None:
            return False
        self._waiting[receiver] -= 1
        return True

    def _check_receivers(self) -> None:
        """Give up a scorer or env rank that has work and has not answered anything for the deadline."""
        now = time.monotonic()
        for rank, waiting in sorted((+self._waiting).items()):
            silent_s = now - self._heard[rank]
            if silent_s > self._controller.command_s:
                self._controller.give_up(rank, f"{waiting} responses wait there without an answer", silent_s)

    # -- events --------------------------------------------------------------------------------------------------

    def _collect(self, prompts: Mapping[int, Prompt]) -> list[events.Event]:
        arrived: list[events.Event] = []
        while True:
            for rank, event in self._controller.events():
                self._heard[rank] = time.monotonic()
                arrived.extend(self._translate(rank, event, prompts))
            self._check_receivers()
            if not self._deterministic:
                return arrived
            if not any(self._bursts.values()) and not self._reached:
                return sorted(arrived, key=_order)

    def _translate(self, rank: int, event: messages.Event, prompts: Mapping[int, Prompt]) -> Iterator[events.Event]:
        match event:
            case messages.BurstDone():
                yield from self._burst_done(rank, event)
            case messages.Scored():
                yield from (self._scored(result, prompts) for result in event.samples)
            case messages.Observed():
                if event.ended:
                    yield self._scored(event.result, prompts)
                else:
                    self._answered(event.sample)
                    yield events.Answered((event.sample,))
            case messages.Lost():
                stranded = tuple(s for s, receiver in self._reached.items() if receiver == rank)
                yield from self._stranded(stranded)

    def _burst_done(self, rank: int, event: messages.BurstDone) -> Iterator[events.Event]:
        self._bursts[rank] -= 1
        self._live[rank] -= len(event.finished) + len(event.turns)
        receivers = self._receivers.pop((rank, event.seq), [])
        for sample in self._dropped.pop((rank, event.seq), []):
            self._sizes.pop(sample, None)
        aborted = tuple((e.sample, e.model_tokens) for e in event.finished if e.reason == FinishReason.ABORT)
        if aborted:
            yield events.Aborted(aborted)
        finished = [e for e in event.finished if e.reason != FinishReason.ABORT]
        ended = finished + event.turns
        if event.tokens:
            self._note({"system/decode_tps": Stat(event.tokens, event.seconds)})
        if not ended:
            return
        self._sizes |= {e.sample: Sizes(e.total_tokens, e.model_tokens) for e in ended}
        waiting = [e.sample for e in ended if e.sample not in self._early]
        self._early.difference_update(e.sample for e in ended)
        self._reach(waiting, receivers)
        yield events.BurstDone(
            rank,
            finished=tuple((e.sample, e.model_tokens, FinishReason(e.reason)) for e in finished),
            turns=tuple((e.sample, e.model_tokens) for e in event.turns),
        )
        yield from self._stranded(tuple(s for s in waiting if self._reached[s] in self._controller.lost))

    def _answered(self, sample: int) -> None:
        """Its scorer or environment has answered, maybe before the replica's BurstDone came."""
        if not self._leave(sample):
            self._early.add(sample)

    def _stranded(self, samples: tuple[int, ...]) -> Iterator[events.Event]:
        """Samples whose scorer or environment is gone: score again, or start the group anew."""
        if samples:
            for sample in samples:
                self._leave(sample)
            yield events.Failed(samples, "an env rank was lost") if self._envs else events.ScorerLost(samples)

    def _scored(self, result: messages.ScoredSample, prompts: Mapping[int, Prompt]) -> events.Event:
        self._answered(result.sample)
        prompt = prompts.get(split_sample_id(result.sample)[0])
        if prompt is not None:
            self._note({f"{prompt.domain}/score": scalar(result.score)})
            self._note({f"env/{prompt.domain}/{name}": scalar(value) for name, value in result.metrics.items()})
        return events.Scored(result.sample, result.reward, result.score, result.error)

    def _note(self, stats: Stats) -> None:
        self._stats.append(stats)


def _order(event: events.Event) -> tuple:
    """Bursts before answers before scores, each by replica or sample."""
    match event:
        case events.BurstDone():
            return (0, event.replica)
        case events.Aborted():
            return (1, event.lengths)
        case events.Answered():
            return (2, event.sample_ids)
        case events.Scored():
            return (3, event.sample_id)
        case _:
            return (4, repr(event))


def _admissions(
    samples: Sequence[int], prompts: Mapping[int, Prompt], sampling: messages.Sampling, seed: int
) -> Iterator[messages.Admit]:
    """Admit messages of about 1 MiB; siblings stay together unless their prompt alone is larger."""
    payloads: dict[int, messages.PromptPayload] = {}
    batch: list[tuple[int, int]] = []
    size = 0
    for sample in samples:
        uid = split_sample_id(sample)[0]
        if prompts and uid not in payloads:
            payload = _payload(prompts[uid])
            if size + len(payload.token_ids) + len(payload.meta) > PAYLOAD_BYTES and batch:
                yield messages.Admit(list(payloads.values()), batch, sampling)
                payloads, batch, size = {}, [], 0
            payloads[uid] = payload
            size += len(payload.token_ids) + len(payload.meta)
        batch.append((sample, sampling_seed(seed, sample)))
    if batch:
        yield messages.Admit(list(payloads.values()), batch, sampling)


def _payload(prompt: Prompt) -> messages.PromptPayload:
    meta = json.dumps({"prompt": prompt.text, "answer": prompt.answer, "extra": prompt.extra})
    return messages.PromptPayload(
        prompt.uid, prompt.domain, np.array(prompt.token_ids, dtype=np.int32).tobytes(), meta.encode()
    )
