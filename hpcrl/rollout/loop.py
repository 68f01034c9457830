"""The loop that drives a rollout scheduler over the real generator, reward and env ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from hpcrl.control import messages
from hpcrl.control.clock import AwakeClock
from hpcrl.control.controller import Controller
from hpcrl.metrics.stats import Stat, Stats, merge, scalar
from hpcrl.rollout import events
from hpcrl.rollout.pace import Pace
from hpcrl.rollout.scheduler import RolloutScheduler
from hpcrl.rollout.types import FinishReason, Prompt, receiver_of, sampling_seed, split_sample_id

BURSTS_AHEAD = 2
PAYLOAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """Tokens of a finished sample: with its prompt and observations, and of the model alone; bytes of its messages."""

    total: int
    model: int
    text: int = 0


class BackgroundError(RuntimeError):
    """Generating ahead failed while the controller waited for something else; __cause__ says why."""


@dataclass
class _Stream:
    """A scheduler at work: where its prompts come from and what it has still to hear."""

    scheduler: RolloutScheduler
    prompts: dict[int, Prompt]
    draw: Callable[[int], list[Prompt]]
    sampling: messages.Sampling
    arrived: list[events.Event] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)


class _Reached(NamedTuple):
    """Where a sample is that has left its replica for an answer; acting: with its environment, else with a scorer."""

    receiver: int
    replica: int
    acting: bool


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
        free: Collection[int] = (),
    ):
        """`free`: the replicas whose ranks neither train nor control, so that they may go on while others do."""
        self._controller, self._seed, self._burst_tokens = controller, seed, burst_tokens
        self._deterministic, self._free = deterministic, frozenset(free)
        self._needed_elsewhere = frozenset(replicas) - self._free  # in the background
        self._replicas, self._scorers, self._envs = dict(replicas), list(scorers), list(envs)
        self._live: Counter[int] = Counter()  # samples a replica decodes or queues
        self._bursts: Counter[int] = Counter()  # bursts on their way
        self._reached: dict[int, _Reached] = {}  # samples that are with a scorer or environment
        self._waiting: Counter[int] = Counter()  # of these, the number per rank
        self._held: set[int] = set()  # samples that await their siblings at a scorer
        self._siblings_meet = False  # some reward scores groups
        self._early: set[int] = set()  # samples whose answer overtook the BurstDone they ended in
        self._told: dict[tuple[int, int], messages.Burst] = {}  # (replica, burst) -> whom it was told to send to
        self._dropped: dict[tuple[int, int], list[int]] = {}  # (replica, abort) -> samples it was told to drop
        self._pace = Pace()
        self._clock = AwakeClock(controller.command_s)
        self._heard: dict[int, float] = {}  # scorer or env rank -> when it last showed that it works
        self._sizes: dict[int, dict[int, Sizes]] = {}  # by replica, of ended samples neither taken nor dropped
        self._streams: list[_Stream] = []  # the one that is driven last

    def drive(
        self,
        scheduler: RolloutScheduler,
        prompts: dict[int, Prompt],
        draw: Callable[[int], list[Prompt]],
        sampling: messages.Sampling,
    ) -> Harvest:
        """Run until the scheduler's batch is ready and take it. `prompts` (uid -> prompt) gains what is drawn.

        The trained samples stay on their replicas until they are handed over or forgotten. A scheduler that may
        generate ahead goes on afterwards: between two drives of its own under background() and the drives of others.
        RolloutExhausted when the step can get no batch; RankFailed and RankSilent as the controller raises them.
        """
        stream = next((stream for stream in self._streams if stream.scheduler is scheduler), None)
        if stream is None:
            stream = _Stream(scheduler, prompts, draw, sampling)
            self._streams.append(stream)
        self.tell_lost()
        self._pause(frozenset())
        while True:
            moved = [self._advance(each) for each in self._streams]
            if scheduler.ready():
                self._settle_down(self._free if scheduler.generates_ahead else ())
                if not any(isinstance(event, events.ReplicaLost) for event in stream.arrived):
                    break
            self._keep_busy(self._replicas)
            if any(self._bursts.values()) or self._awaited():
                self._collect()
            elif not any(moved) and not stream.arrived:
                raise scheduler.exhausted("no response is on its way and no prompt is left to draw")
        if not scheduler.generates_ahead:
            scheduler.plan(stream.arrived)  # the batch stands: this only counts what was aborted
            stream.arrived = []
        groups = scheduler.take()
        sizes = {s.id: self._sizes[s.replica].pop(s.id) for group in groups for s in group.samples}
        stats, stream.stats = merge(stream.stats), []
        if not scheduler.generates_ahead:
            self._streams.remove(stream)
            # No burst is on its way that could still tell of them.
            self._early = {sample for sample in self._early if split_sample_id(sample)[0] not in stream.prompts}
        return Harvest(groups, sizes, stats)

    def background(self, arrived: list[tuple[int, messages.Event]]) -> None:
        """Go on with the schedulers that generate ahead, while the controller waits for other ranks' answers.

        BackgroundError where they cannot or the data is bad: no error of what is waited for."""
        self._take_in(arrived)
        self._pause(self._needed_elsewhere)
        try:
            for stream in self._streams:
                self._advance(stream)
        except (ValueError, OSError) as error:
            raise BackgroundError(str(error)) from error
        self._keep_busy(self._free)

    def _pause(self, replicas: frozenset[int]) -> None:
        """Only these replicas have no time to generate."""
        for stream in self._streams:
            stream.scheduler.pause(replicas)

    def _advance(self, stream: _Stream) -> bool:
        """Let a scheduler hear what has arrived and carry out what it wants; whether there was anything."""
        arrived, stream.arrived = stream.arrived, []
        stream.scheduler.tell(arrived)  # first, since a rejected group wants another prompt
        fresh = stream.draw(stream.scheduler.wants())
        stream.prompts.update((prompt.uid, prompt) for prompt in fresh)
        stream.scheduler.offer(prompt.uid for prompt in fresh)
        commands = stream.scheduler.plan()
        for command in commands:
            self._carry_out(command, stream.prompts, stream.sampling)
        return self._bring_together(stream) or bool(arrived or fresh or commands)

    def _bring_together(self, stream: _Stream) -> bool:
        """Have the groups scored whose samples are all with a reward that scores groups; whether there was one."""
        if not self._held:
            return False
        held = sorted(sample for sample in self._held & self._reached.keys() if self._stream_of(sample) is stream)
        complete, unwanted = stream.scheduler.together(held)
        self._release_held(unwanted)
        for samples in complete:
            receivers = [self._reached[sample].receiver for sample in samples]
            for sample, receiver in zip(samples, receivers, strict=True):
                if receiver != receivers[0]:  # sent before it was known that siblings have to meet
                    replica = self._reached[sample].replica
                    self._release_held([sample])
                    self._reach(replica, [sample], receivers[:1], acting=False)
                    self._controller.send(replica, messages.Rescore([sample], receivers[:1]))
            if len(set(receivers)) == 1:
                self._held -= set(samples)
                self._expect(receivers[0], len(samples))
                self._controller.send(receivers[0], messages.ScoreTogether(samples))
        return bool(complete)

    def _release_held(self, samples: Sequence[int]) -> None:
        """Let the scorers forget samples that await their siblings."""
        unwanted: dict[int, list[int]] = {}
        for sample in samples:
            unwanted.setdefault(self._reached[sample].receiver, []).append(sample)
            self._leave(sample)
        for receiver, held in unwanted.items():
            if receiver not in self._controller.lost:
                self._controller.send(receiver, messages.Unwanted(held))

    def _awaited(self) -> bool:
        """Whether a scorer or environment is at work."""
        return len(self._reached) > len(self._held & self._reached.keys())

    def sizes(self, groups: Iterable[events.Group]) -> dict[int, Sizes]:
        """Of the samples of groups that were not taken yet."""
        return {s.id: self._sizes[s.replica][s.id] for group in groups for s in group.samples}

    def restore_sizes(self, groups: Iterable[events.Group], sizes: Mapping[int, Sizes]) -> None:
        """Know the samples of groups that wait to be taken again, or that replicas hold from a checkpoint."""
        for group in groups:
            for sample in group.samples:
                self._sizes.setdefault(sample.replica, {})[sample.id] = sizes[sample.id]

    def tell_lost(self) -> None:
        """Let every scheduler know at once which replicas are lost."""
        lost = [replica for replica in self._replicas if replica in self._controller.lost]
        for replica in lost:
            self._lose(replica)
        for stream in self._streams:
            stream.scheduler.tell(events.ReplicaLost(replica) for replica in lost)

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
                receivers = self._alive(self._scorers, replica)
                self._reach(replica, samples, receivers, acting=False)
                self._controller.send(replica, messages.Rescore(samples, receivers))
            case events.Drop():
                self._bursts[replica] += 1  # answered like a burst
                seq = self._controller.send(replica, messages.AbortSamples(samples))
                self._dropped[replica, seq] = samples

    def _keep_busy(self, replicas: Iterable[int]) -> None:
        ahead = 1 if self._deterministic else BURSTS_AHEAD
        for replica in replicas:
            while self._live[replica] > 0 and self._bursts[replica] < ahead and replica not in self._controller.lost:
                receivers, envs = self._alive(self._scorers, replica), self._alive(self._envs, replica)
                burst = messages.Burst(self._burst_tokens, receivers, envs)
                self._told[replica, self._controller.send(replica, burst)] = burst
                self._bursts[replica] += 1

    def _settle_down(self, going_on: Collection[int]) -> None:
        """Wait for the bursts that are still on their way, so that a step ends with silent replicas, but for those
        that go on."""
        pausing = [replica for replica in self._replicas if replica not in going_on]
        while any(self._bursts[replica] > 0 for replica in pausing if replica not in self._controller.lost):
            self._take_in(self._controller.events())

    def _alive(self, ranks: Sequence[int], replica: int) -> list[int]:
        """The environments or scorers that get this replica's responses: itself where all of them generate, as mail
        would only cost time and each has as many."""
        if (
            replica in ranks
            and self._replicas.keys() >= set(ranks)
            and not (self._siblings_meet and ranks == self._scorers)
        ):
            return [replica]
        return [rank for rank in ranks if rank not in self._controller.lost]

    def _reach(self, replica: int, samples: Sequence[int], alive: Sequence[int], acting: bool) -> None:
        for sample in samples:
            receiver = receiver_of(sample, self._envs if acting else self._scorers, alive)
            self._reached[sample] = _Reached(receiver, replica, acting)
            if acting or sample not in self._held:
                self._expect(receiver, 1)

    def _expect(self, receiver: int, count: int) -> None:
        if not self._waiting[receiver]:
            self._heard[receiver] = self._clock.now()
        self._waiting[receiver] += count

    def _hold(self, samples: Iterable[int]) -> None:
        """These await their siblings: their scorer is not asked for an answer. It may say so before the BurstDone."""
        self._siblings_meet = True
        for sample in samples:
            if sample in self._reached and sample not in self._held:
                self._waiting[self._reached[sample].receiver] -= 1
            self._held.add(sample)

    def _leave(self, sample: int) -> bool:
        """The sample is with its scorer or environment no more; whether it was."""
        reached = self._reached.pop(sample, None)
        if reached is not None and sample not in self._held:
            self._waiting[reached.receiver] -= 1
        self._held.discard(sample)
        return reached is not None

    def _lose(self, replica: int) -> None:
        """Expect nothing any more of a replica, nor of those that it should have sent something to."""
        self._bursts.pop(replica, None)
        self._live.pop(replica, None)
        self._sizes.pop(replica, None)
        self._pace.forget(replica)
        at_home = [sample for sample, reached in self._reached.items() if reached.replica == replica]
        self._release_held([sample for sample in at_home if sample in self._held])
        for sample in [sample for sample in at_home if sample in self._reached]:
            self._leave(sample)

    def _check_receivers(self) -> None:
        """Give up a scorer or env rank that has work and has not answered anything for the deadline."""
        now = self._clock.now()
        for rank, waiting in sorted((+self._waiting).items()):
            silent_s = now - self._heard[rank]
            if silent_s > self._controller.command_s:
                self._controller.give_up(rank, f"{waiting} responses wait there without an answer", silent_s)

    # -- events --------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Wait for events; in deterministic mode for all that a burst leads to, in an order of their own."""
        while True:
            self._take_in(self._controller.events())
            self._check_receivers()
            if not self._deterministic:
                return
            if not any(self._bursts.values()) and not self._awaited():
                for stream in self._streams:
                    stream.arrived.sort(key=_order)
                return

    def _take_in(self, happened: Iterable[tuple[int, messages.Event]]) -> None:
        """Give every event to the stream whose samples it is about; one that nobody knows any more to the first."""
        for rank, event in happened:
            self._heard[rank] = self._clock.now()
            for told in self._translate(rank, event):
                if len(self._streams) == 1:
                    self._streams[0].arrived.append(told)
                    continue
                for stream in self._streams:
                    if (part := events.only(told, partial(self._belongs, stream))) is not None:
                        stream.arrived.append(part)

    def _belongs(self, stream: _Stream, sample: int) -> bool:
        return self._stream_of(sample) is stream

    def _stream_of(self, sample: int) -> _Stream | None:
        """Whose sample it is; the first stream's if nobody knows it any more."""
        uid = split_sample_id(sample)[0]
        known = next((stream for stream in self._streams if uid in stream.prompts), None)
        return known or next(iter(self._streams), None)

    def _translate(self, rank: int, event: messages.Event) -> Iterator[events.Event]:
        match event:
            case messages.BurstDone():
                yield from self._burst_done(rank, event)
            case messages.Scored():
                yield from (self._scored(result) for result in event.samples)
            case messages.AwaitSiblings():
                self._hold(event.samples)
            case messages.Observed():
                if event.ended and event.add_reward:
                    self._answered(event.sample)
                    self._note(event.result)
                    yield events.Played(event.sample, event.result.reward, tuple(event.result.turn_rewards))
                elif event.ended:
                    yield self._scored(event.result)
                else:
                    self._answered(event.sample)
                    yield events.Answered((event.sample,))
            case messages.Lost():
                if rank in self._replicas:
                    self._lose(rank)
                    yield events.ReplicaLost(rank)
                yield from self._stranded([s for s, reached in self._reached.items() if reached.receiver == rank])

    def _burst_done(self, rank: int, event: messages.BurstDone) -> Iterator[events.Event]:
        self._bursts[rank] -= 1
        self._live[rank] -= len(event.finished) + len(event.turns)
        told = self._told.pop((rank, event.seq), None)
        for sample in self._dropped.pop((rank, event.seq), []):
            self._sizes.get(rank, {}).pop(sample, None)
        aborted = tuple((e.sample, e.model_tokens) for e in event.finished if e.reason == FinishReason.ABORT)
        if aborted:
            yield events.Aborted(aborted)
        finished = [e for e in event.finished if e.reason != FinishReason.ABORT]
        ended = finished + event.turns
        if event.tokens and self._streams:
            self._streams[0].stats.append({"system/decode_tps": Stat(event.tokens, event.seconds)})
        if event.tokens and not self._deterministic:
            yield from self._pace.learn(rank, event.tokens, event.seconds)
        if not ended:
            return
        assert told is not None, "responses end in bursts"
        sizes = self._sizes.setdefault(rank, {})
        sizes |= {e.sample: Sizes(e.total_tokens, e.model_tokens, e.text_bytes) for e in ended}
        for some, alive, acting in ((finished, told.receivers, False), (event.turns, told.envs, True)):
            self._reach(rank, [e.sample for e in some if e.sample not in self._early], alive, acting)
        waiting = [e.sample for e in ended if e.sample not in self._early]
        self._early.difference_update(e.sample for e in ended)
        yield events.BurstDone(
            rank,
            finished=tuple((e.sample, e.model_tokens, FinishReason(e.reason)) for e in finished),
            turns=tuple((e.sample, e.model_tokens) for e in event.turns),
        )
        yield from self._stranded([s for s in waiting if self._reached[s].receiver in self._controller.lost])

    def _answered(self, sample: int) -> None:
        """Its scorer or environment has answered, maybe before the replica's BurstDone came."""
        if not self._leave(sample) and any(split_sample_id(sample)[0] in stream.prompts for stream in self._streams):
            self._early.add(sample)

    def _stranded(self, samples: Sequence[int]) -> Iterator[events.Event]:
        """Samples whose scorer or environment is gone: score again, or start the group anew."""
        acting = tuple(sample for sample in samples if self._reached[sample].acting)
        scoring = tuple(sample for sample in samples if not self._reached[sample].acting)
        for sample in samples:
            self._leave(sample)
        if acting:
            yield events.Failed(acting, events.ENV_LOST)
        if scoring:
            yield events.ScorerLost(scoring)

    def _scored(self, result: messages.ScoredSample) -> events.Event:
        self._answered(result.sample)
        self._note(result, scored=True)
        parts = tuple(result.turn_rewards), result.token_rewards
        return events.Scored(result.sample, result.reward, result.score, result.error, *parts)

    def _note(self, result: messages.ScoredSample, scored: bool = False) -> None:
        """Keep the statistics of a result."""
        stream = self._stream_of(result.sample)
        prompt = stream.prompts.get(split_sample_id(result.sample)[0]) if stream is not None else None
        if stream is not None and prompt is not None:
            stats = {f"env/{prompt.domain}/{name}": scalar(value) for name, value in result.metrics.items()}
            stream.stats.append(stats | ({f"{prompt.domain}/score": scalar(result.score)} if scored else {}))


def _order(event: events.Event) -> tuple:
    """Bursts before answers before scores, each by replica or sample."""
    match event:
        case events.BurstDone():
            return (0, event.replica)
        case events.Aborted():
            return (1, event.lengths)
        case events.Answered():
            return (2, event.sample_ids)
        case events.Played():
            return (2, (event.sample_id,))
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
    told = {"prompt": prompt.text, "answer": prompt.answer, "extra": prompt.extra}
    told |= {"messages": prompt.messages, "tools": prompt.tools}
    meta = json.dumps(told, ensure_ascii=False, separators=(",", ":"))  # as small as hpcrl.data.rows reckons
    return messages.PromptPayload(
        prompt.uid, prompt.domain, np.array(prompt.token_ids, dtype=np.int32).tobytes(), meta.encode()
    )
