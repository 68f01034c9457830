"""The loop that runs a rollout scheduler on the real generator, reward and env ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hpcrl.messaging import messages
from hpcrl.messaging.dispatcher import Controller
from hpcrl.metrics.stats import Stat, Stats, merge, scalar
from hpcrl.rollout.admission import admissions
from hpcrl.rollout.links import ReplicaLink
from hpcrl.rollout.pending_answers import PendingAnswers
from hpcrl.rollout.replica_speeds import ReplicaSpeeds
from hpcrl.rollout.scheduling import events
from hpcrl.rollout.scheduling.scheduler import RolloutExhausted, RolloutScheduler
from hpcrl.rollout.types import (
    FIRST_VALIDATION_UID,
    FinishReason,
    Prompt,
    Sizes,
    is_greedy,
    receiver_of,
    split_sample_id,
)
from hpcrl.run_folder.user_errors import UserErrors
from hpcrl.timeline.recorder import Recorder

CHUNKS_AHEAD = 2


class BackgroundError(RuntimeError):
    """Generating ahead failed while the controller waited for other answers; __cause__ is the error."""


@dataclass
class PendingPrompt:
    """A prompt whose group is incomplete.

    Args:
        age_s: Seconds since it was drawn; None if an earlier attempt of the run drew it.
        done: Number of its responses that are done, of `total`.
        at: Rank of a scorer or environment -> number of responses that wait for its answer.
    """

    uid: int
    domain: str
    age_s: float | None
    done: int
    total: int
    at: Mapping[int, int]

    def __str__(self) -> str:
        age = "drawn by an earlier attempt" if self.age_s is None else f"drawn {self.age_s:.0f} s ago"
        told = f"prompt {self.uid} ({self.domain}), {age}: {self.done} of {self.total} responses done"
        return told + "".join(f", {number} at rank {rank}" for rank, number in sorted(self.at.items()))


@dataclass
class _Stream:
    """A running scheduler, with the source of its prompts and its unread events."""

    scheduler: RolloutScheduler
    prompts: dict[int, Prompt]
    draw: Callable[[int], list[Prompt]]
    sampling: messages.Sampling
    arrived: list[events.SchedulerEvent] = field(default_factory=list)
    drawn: dict[int, float] = field(default_factory=dict)  # uid -> when its prompt was drawn
    stats: list[Stats] = field(default_factory=list)
    of_samples: list[tuple[int, Stats]] = field(default_factory=list)  # statistics of samples, by arrival


@dataclass
class CollectedRollouts:
    """Result of collect(): the scheduler's groups, their samples' sizes, and statistics."""

    groups: list[events.Group]
    sizes: dict[int, Sizes]
    stats: Stats = field(default_factory=dict)


class RolloutLoop:
    """Executes a scheduler's commands. Every replica with work has two decode chunks queued ahead.

    In deterministic mode all replicas run each decode chunk together. The scheduler gets the events sorted, once all of
    the decode chunk's responses are scored, so generation depends only on the sequence of commands.

    Args:
        replicas: Ranks of each replica, identified by its first rank.
        free: First ranks of replicas that neither train nor control, so they may generate while other ranks do.
        scorers_of: Scorers of a domain; None if every scorer scores all domains.
        errors: Counts the errors of samples.
        timeline: Records the lives of samples.
    """

    def __init__(
        self,
        controller: Controller,
        replicas: Iterable[Sequence[int]],
        scorers: Sequence[int],
        envs: Sequence[int],
        *,
        seed: int,
        decode_chunk_tokens: int,
        deterministic: bool,
        free: Collection[int] = (),
        scorers_of: Callable[[str], Sequence[int]] | None = None,
        errors: UserErrors | None = None,
        timeline: Recorder | None = None,
    ):
        self._controller, self._seed, self._decode_chunk_tokens = controller, seed, decode_chunk_tokens
        self._deterministic = deterministic
        self._replicas = {ranks[0]: ReplicaLink(controller, ranks) for ranks in replicas}
        self._generating = frozenset(rank for replica in self._replicas.values() for rank in replica.ranks)
        self._free = [self._replicas[first] for first in free]
        self._needed_elsewhere = frozenset(self._replicas.keys() - set(free))  # by other work, in background()
        self._scorers, self._envs, self._scorers_of = list(scorers), list(envs), scorers_of
        self._awaited = PendingAnswers(controller, {*scorers, *envs})
        self._pace = ReplicaSpeeds()
        self._errors = errors or UserErrors(None)
        self.timeline = timeline
        self._waited_s = 0.0  # in this collect(): waited for scorers and environments only
        self._streams: list[_Stream] = []  # collect() runs the last one

    def collect(
        self,
        scheduler: RolloutScheduler,
        prompts: dict[int, Prompt],
        draw: Callable[[int], list[Prompt]],
        sampling: messages.Sampling,
    ) -> CollectedRollouts:
        """Run until the scheduler's batch is ready, and take it. Drawn prompts are added to `prompts` (uid -> prompt).

        The batch's samples stay on their replicas until they are transferred or forgotten. A scheduler that may
        generate ahead continues between its calls: in background() and in collect() of other schedulers.
        RolloutExhausted if the step can get no batch; RankFailed and RankSilent as in the controller.
        """
        stream = next((stream for stream in self._streams if stream.scheduler is scheduler), None)
        if stream is None:
            stream = _Stream(scheduler, prompts, draw, sampling)
            self._streams.append(stream)
        began = time.monotonic()
        self.tell_lost()
        self._pause(frozenset())
        self._waited_s = 0.0
        try:
            self._drive_until_ready(scheduler, stream)
        finally:
            self._errors.write()
            if self.timeline is not None:
                validation = next(iter(stream.prompts), 0) >= FIRST_VALIDATION_UID
                self.timeline.waited("validation" if validation else "rollouts", began)
        if not scheduler.generates_ahead:
            scheduler.plan(stream.arrived)  # the batch is fixed: this only counts aborted samples
            stream.arrived = []
        groups = scheduler.take_batch()
        stream.drawn = {uid: at for uid, at in stream.drawn.items() if uid in stream.prompts}
        sizes = {s.id: self._replicas[s.replica].sizes.pop(s.id) for group in groups for s in group.samples}
        # By sample, so that sums have the same bits whatever arrived first.
        of_samples = [stats for _, stats in sorted(stream.of_samples, key=lambda noted: noted[0])]
        stats = merge([*stream.stats, *of_samples, {"time/step_reward_wait": scalar(self._waited_s)}])
        stream.stats, stream.of_samples = [], []
        if not scheduler.generates_ahead:
            self._streams.remove(stream)
            self._awaited.drop_early(stream.prompts.keys())  # no outstanding decode chunk can still report them
        return CollectedRollouts(groups, sizes, stats)

    def _drive_until_ready(self, scheduler: RolloutScheduler, stream: _Stream) -> None:
        while True:
            moved = [self._advance(each) for each in self._streams]
            if scheduler.ready():
                self._wait_until_idle(self._free if scheduler.generates_ahead else ())
                if not any(isinstance(event, events.ReplicaLost) for event in stream.arrived):
                    break
            self._queue_chunks(self._replicas.values())
            if self._on_their_way():
                self._wait_for_events()
            elif not any(moved) and not stream.arrived:
                raise scheduler.exhausted("no response is on its way and no prompt is left to draw")

    def background(self, arrived: list[tuple[int, messages.Event]]) -> None:
        """Advance the schedulers that generate ahead, while the controller waits for other ranks' answers. Raises
        BackgroundError if they fail or the data is bad: the answers that the controller waits for did not fail."""
        self._dispatch(arrived)
        self._pause(self._needed_elsewhere)
        try:
            for stream in self._streams:
                self._advance(stream)
        except (ValueError, OSError) as error:
            raise BackgroundError(str(error)) from error
        self._queue_chunks(self._free)

    def _pause(self, replicas: frozenset[int]) -> None:
        """Pause exactly these replicas."""
        for stream in self._streams:
            stream.scheduler.pause(replicas)

    def _advance(self, stream: _Stream) -> bool:
        """Pass a scheduler its events and execute its commands; returns whether there were any."""
        arrived, stream.arrived = stream.arrived, []
        stream.scheduler.handle_events(arrived)  # first, since a rejected group needs another prompt
        fresh = stream.draw(stream.scheduler.num_wanted())
        stream.prompts.update((prompt.uid, prompt) for prompt in fresh)
        if fresh and self.timeline is not None:
            self.timeline.drawn((prompt.uid, prompt.domain) for prompt in fresh)
        stream.drawn.update(dict.fromkeys((prompt.uid for prompt in fresh), time.monotonic()))
        stream.scheduler.add_prompts(prompt.uid for prompt in fresh)
        commands = stream.scheduler.plan()
        for command in commands:
            self._execute(command, stream.prompts, stream.sampling)
        return self._score_complete_groups(stream) or bool(arrived or fresh or commands)

    def _score_complete_groups(self, stream: _Stream) -> bool:
        """Request scores of complete groups from rewards that score groups; returns whether there were any."""
        waiting = self._awaited.awaiting_group()
        if not waiting:
            return False
        complete, unwanted = stream.scheduler.complete_groups([s for s in waiting if self._stream_of(s) is stream])
        self._release([sample for sample in unwanted if not self._to_be_reported(sample)])
        for samples in complete:
            receivers = [self._receiver(sample) for sample in samples]
            for sample, receiver in zip(samples, receivers, strict=True):
                if receiver != receivers[0]:  # sent before it was known that the reward scores groups
                    replica = self._replicas[self._awaited[sample].replica]
                    self._release([sample])
                    self._reach(replica, [sample], receivers[:1], acting=False)
                    replica.send(messages.Rescore([sample], receivers[:1]))
            if len(set(receivers)) == 1:
                self._awaited.score_group(samples)
                self._controller.send(receivers[0], messages.ScoreGroup(samples))
        return bool(complete)

    def _release(self, samples: Sequence[int]) -> None:
        """Make the scorers drop these samples, which wait for their groups."""
        unwanted: dict[int, list[int]] = {}
        for sample in samples:
            unwanted.setdefault(self._receiver(sample), []).append(sample)
            self._awaited.remove(sample)
        for receiver, held in unwanted.items():
            if receiver not in self._controller.lost:
                self._controller.send(receiver, messages.DropAwaiting(held))

    def _to_be_reported(self, sample: int) -> bool:
        """Whether a replica, unless lost, will still report the end of an unwanted sample that waits for its group."""
        dropping = (replica.drops(sample) for replica in self._replicas.values())
        return self._awaited[sample].replica < 0 and any(dropping)

    def _receiver(self, sample: int) -> int:
        receiver = self._awaited[sample].receiver
        assert receiver is not None, "the sample has been sent"
        return receiver

    def _on_their_way(self) -> bool:
        """Whether a decode chunk or an answer is outstanding."""
        return any(replica.num_chunks for replica in self._replicas.values()) or self._awaited.pending

    def pending(self) -> list[PendingPrompt]:
        """The started prompts whose groups are incomplete, oldest first."""
        now, found = time.monotonic(), []
        for stream in self._streams:
            for uid, done, total in stream.scheduler.started():
                age_s = now - stream.drawn[uid] if uid in stream.drawn else None
                at = Counter(self._awaited.receivers_of(uid))
                found.append(PendingPrompt(uid, stream.prompts[uid].domain, age_s, done, total, at))
        return sorted(found, key=lambda prompt: -(prompt.age_s or 0.0))

    def sizes(self, groups: Iterable[events.Group]) -> dict[int, Sizes]:
        """Sample sizes of groups that were not taken yet."""
        return {s.id: self._replicas[s.replica].sizes[s.id] for group in groups for s in group.samples}

    def restore_sizes(self, groups: Iterable[events.Group], sizes: Mapping[int, Sizes]) -> None:
        """Restore sample sizes of groups that wait to be taken again, or that replicas hold from a checkpoint."""
        for group in groups:
            for sample in group.samples:
                self._replicas[sample.replica].sizes[sample.id] = sizes[sample.id]

    def tell_lost(self) -> None:
        """Report lost replicas to every scheduler at once."""
        lost = [replica for replica in self._replicas.values() if replica.lost]
        for replica in lost:
            self._lose(replica)
        for stream in self._streams:
            stream.scheduler.handle_events(events.ReplicaLost(replica.first) for replica in lost)

    def forget(self, groups: Sequence[events.Group]) -> None:
        """Make the replicas drop the groups' samples."""
        held: dict[int, list[int]] = {}
        for group in groups:
            for sample in group.samples:
                held.setdefault(sample.replica, []).append(sample.id)
        for first, samples in held.items():
            self._replicas[first].send(messages.DropSamples(samples))

    # -- commands ------------------------------------------------------------------------------------------------

    def _execute(
        self, command: events.SchedulerCommand, prompts: Mapping[int, Prompt], sampling: messages.Sampling
    ) -> None:
        replica, samples = self._replicas[command.replica], list(command.sample_ids)
        match command:
            case events.Generate() | events.Continue():
                replica.live += len(samples)
                known = isinstance(command, events.Continue)
                if self.timeline is not None and not known:
                    self.timeline.admitted(replica.first, ((sample, split_sample_id(sample)[0]) for sample in samples))
                for message in admissions(samples, {} if known else prompts, sampling, self._seed):
                    replica.send(message)
            case events.SendToScorer():
                receivers = self._alive(self._scorers, replica)
                self._reach(replica, samples, receivers, acting=False)
                replica.send(messages.Rescore(samples, receivers))
            case events.Drop():
                replica.drop(samples)
                if self.timeline is not None:
                    self.timeline.closed([sample for sample in samples if is_greedy(sample)], "baseline")
                    self.timeline.closed([sample for sample in samples if not is_greedy(sample)], "dropped")

    def _queue_chunks(self, replicas: Iterable[ReplicaLink]) -> None:
        ahead = 1 if self._deterministic else CHUNKS_AHEAD
        for replica in replicas:
            while replica.live > 0 and replica.num_chunks < ahead and not replica.lost:
                receivers, envs = self._alive(self._scorers, replica), self._alive(self._envs, replica)
                replica.decode_chunk(messages.DecodeChunk(self._decode_chunk_tokens, receivers, envs))

    def _wait_until_idle(self, going_on: Collection[ReplicaLink]) -> None:
        """Wait for outstanding decode chunks at the end of a step: all replicas are idle then, except `going_on`."""
        pausing = [replica for replica in self._replicas.values() if replica not in going_on]
        while any(replica.num_chunks > 0 for replica in pausing if not replica.lost):
            self._dispatch(self._controller.events())

    def _alive(self, ranks: Sequence[int], replica: ReplicaLink) -> list[int]:
        """The living scorers or env ranks for this replica's responses. If all of `ranks` are generators, the replica
        uses only its own: the load is equal, and it needs no messages to other ranks."""
        own = [rank for rank in replica.ranks if rank in ranks]
        tied = ranks is self._scorers and (self._awaited.scores_groups or self._scorers_of is not None)
        if own and self._generating.issuperset(ranks) and not tied:
            return own
        return [rank for rank in ranks if rank not in self._controller.lost]

    def _reach(self, replica: ReplicaLink, samples: Sequence[int], alive: Sequence[int], acting: bool) -> None:
        for sample in samples:
            receiver = receiver_of(sample, self._envs if acting else self._scorers_for(sample), alive)
            self._awaited.sent(sample, receiver, replica.first, acting)

    def _scorers_for(self, sample: int) -> Sequence[int]:
        """The scorers of the sample's domain. All scorers if its prompt has ended: then no answer is needed."""
        prompt = self._prompt_of(sample) if self._scorers_of is not None else None
        return self._scorers if self._scorers_of is None or prompt is None else self._scorers_of(prompt.domain)

    def _prompt_of(self, sample: int) -> Prompt | None:
        stream = self._stream_of(sample)
        return None if stream is None else stream.prompts.get(split_sample_id(sample)[0])

    def _lose(self, replica: ReplicaLink) -> None:
        """Stop waiting for a replica and for answers about samples that it should have sent; end their episodes."""
        for env in self._envs if replica.lose() else ():
            if env not in self._controller.lost:
                self._controller.send(env, messages.EndEpisodes(replica.first))
        self._pace.forget(replica.first)
        if self.timeline is not None:
            self.timeline.lost_replica(replica.first)
        at_home = self._awaited.where(lambda away: away.replica == replica.first)
        self._release([sample for sample in at_home if self._awaited[sample].awaits_group])
        for sample in at_home:
            self._awaited.remove(sample)

    # -- events --------------------------------------------------------------------------------------------------

    def _wait_for_events(self) -> None:
        """Wait for events; in deterministic mode until nothing is outstanding, then sort them."""
        while True:
            start, idle = time.perf_counter(), not any(replica.num_chunks for replica in self._replicas.values())
            self._dispatch(self._controller.events())
            self._waited_s += idle * (time.perf_counter() - start)
            self._awaited.check()
            if not self._deterministic:
                return
            if not self._on_their_way():
                for stream in self._streams:
                    stream.arrived.sort(key=_order)
                return

    def _dispatch(self, happened: Iterable[tuple[int, messages.Event]]) -> None:
        """Pass every event to the stream of its samples; events of unknown samples go to the first stream."""
        for rank, event in happened:
            self._awaited.touch(rank)
            if self.timeline is not None:
                _record(self.timeline, rank, event)
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
        """The stream of a sample; the first stream for an unknown sample."""
        uid = split_sample_id(sample)[0]
        known = next((stream for stream in self._streams if uid in stream.prompts), None)
        return known or next(iter(self._streams), None)

    def _translate(self, rank: int, event: messages.Event) -> Iterator[events.SchedulerEvent]:
        match event:
            case messages.DecodeChunkDone():
                yield from self._decode_chunk_done(self._replicas[rank], event)
            case messages.Scored():
                for result in event.samples:
                    self._report(
                        "generator" if rank in self._replicas and rank not in self._scorers else "reward", result
                    )
                    yield self._scored(result)
            case messages.AwaitGroup():
                self._awaited.hold_for_group(rank, event.samples)
            case messages.Observed():
                self._report("environment", event.result, ends=event.ended and not event.add_reward)
                if event.ended and event.add_reward:
                    self._answered(event.sample)
                    self._note(event.result)
                    result = event.result
                    yield events.Played(event.sample, result.reward, tuple(result.turn_rewards), result.metrics)
                elif event.ended:
                    yield self._scored(event.result, event.failed)
                else:
                    self._answered(event.sample)
                    yield events.Answered((event.sample,))
            case messages.Lost():
                if (replica := self._replicas.get(rank)) is not None:  # with several ranks a loss ends the run
                    self._lose(replica)
                    yield events.ReplicaLost(rank)
                yield from self._stranded(self._awaited.where(lambda away: away.receiver == rank))

    def _decode_chunk_done(
        self, replica: ReplicaLink, event: messages.DecodeChunkDone
    ) -> Iterator[events.SchedulerEvent]:
        told = replica.decode_chunk_done(event)
        aborted = tuple((e.sample, e.model_tokens) for e in event.finished if e.reason == FinishReason.ABORT)
        if aborted:
            yield events.Aborted(aborted)
        finished = [e for e in event.finished if e.reason != FinishReason.ABORT]
        ended = finished + event.turns
        if event.tokens and self._streams:
            self._streams[0].stats.append({"system/decode_tps": Stat(event.tokens, event.seconds)})
        if event.tokens and not self._deterministic:
            yield from self._pace.observe(replica.first, event.tokens, event.seconds)
        if not ended:
            return
        assert told is not None, "responses end in decode chunks"
        replica.sizes |= {e.sample: Sizes(e.total_tokens, e.model_tokens, e.text_bytes) for e in ended}
        waiting = []
        for some, alive, acting in ((finished, told.receivers, False), (event.turns, told.envs, True)):
            reaching = [e.sample for e in some if not self._awaited.answered_early(e.sample)]
            self._reach(replica, reaching, alive, acting)
            waiting += reaching
        yield events.Decoded(
            replica.first,
            finished=tuple((e.sample, e.model_tokens, FinishReason(e.reason)) for e in finished),
            turns=tuple((e.sample, e.model_tokens) for e in event.turns),
        )
        yield from self._stranded([s for s in waiting if self._awaited[s].receiver in self._controller.lost])

    def _answered(self, sample: int) -> None:
        """Record the answer of a sample's scorer or environment, maybe before the replica's DecodeChunkDone."""
        uid = split_sample_id(sample)[0]
        self._awaited.answered(sample, wanted=any(uid in stream.prompts for stream in self._streams))

    def _stranded(self, samples: Sequence[int]) -> Iterator[events.SchedulerEvent]:
        """Events for samples whose scorer or environment is lost: score them again, or restart the group."""
        acting = tuple(sample for sample in samples if self._awaited[sample].acting)
        scoring = tuple(sample for sample in samples if not self._awaited[sample].acting)
        for sample in samples:
            self._awaited.remove(sample)
        if acting:
            yield events.SamplesFailed(acting, events.ENV_LOST)
        if scoring:
            yield events.ScorerLost(scoring)

    def _scored(self, result: messages.ScoredSample, failed: bool = False) -> events.SchedulerEvent:
        self._answered(result.sample)
        self._note(result, scored=True)
        return events.Rewarded(
            result.sample,
            result.reward,
            result.score,
            result.error,
            tuple(result.turn_rewards),
            result.token_rewards,
            failed,
            result.metrics,
            result.extracted,
        )

    def _report(self, source: str, result: messages.ScoredSample, ends: bool = True) -> None:
        """Count the error of a sample, if it has one. RolloutExhausted if the first samples have all failed alike.
        `ends`: whether nothing of the sample can fail any more."""
        if not result.error:
            if ends:
                self._errors.succeeded()
            return
        prompt = self._prompt_of(result.sample)
        self._errors.report(source, prompt.domain if prompt is not None else "", result.error)
        if failure := self._errors.hopeless():
            raise RolloutExhausted(f"{failure}; mend it (a response that cannot be scored should get 0)")

    def _note(self, result: messages.ScoredSample, scored: bool = False) -> None:
        """Record a result's statistics. They describe sampled responses, so greedy baselines are excluded."""
        if is_greedy(result.sample):
            return
        stream, prompt = self._stream_of(result.sample), self._prompt_of(result.sample)
        if stream is not None and prompt is not None:
            stats = {f"env/{prompt.domain}/{name}": scalar(value) for name, value in result.metrics.items()}
            stats |= {f"domain/{prompt.domain}/score": scalar(result.score)} if scored else {}
            stream.of_samples.append((result.sample, stats))


def _record(timeline: Recorder, rank: int, event: messages.Event) -> None:
    """Record when samples' turns were decoded, scored and played."""
    match event:
        case messages.DecodeChunkDone():
            ended = (end for end in [*event.finished, *event.turns] if end.reason != FinishReason.ABORT)
            timeline.decoded(rank, event.decoded_at, ((end.sample, end.model_tokens) for end in ended))
        case messages.Scored():
            for result in event.samples:
                timeline.worked("reward", rank, result.sample, result.started, result.ended, final=True)
        case messages.Observed():
            final, result = event.ended and not event.add_reward, event.result
            timeline.worked("turn", rank, event.sample, result.started, result.ended, final=final)


def _order(event: events.SchedulerEvent) -> tuple:
    """Decode chunks before answers before scores, each by replica or sample."""
    match event:
        case events.Decoded():
            return (0, event.replica)
        case events.Aborted():
            return (1, event.lengths)
        case events.Answered():
            return (2, event.sample_ids)
        case events.Played():
            return (2, (event.sample_id,))
        case events.Rewarded():
            return (3, event.sample_id)
        case _:
            return (4, repr(event))
