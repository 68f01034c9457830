"""The production scheduler in virtual time: what hpcrl.rollout.loop and the pipeline do, without processes.

Engines, environments, rewards and the trainer are simulated; which prompt is generated where, which groups make the
batch and which are given up is decided by hpcrl.rollout.scheduling.scheduler.RolloutScheduler itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hpcrl.rollout.scheduling import events
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutScheduler
from hpcrl.rollout.types import FinishReason
from tests.bench.flash.engine import Engine, Request
from tests.bench.flash.laws import Outcomes
from tests.bench.flash.settings import Training, World

Stats = dict[str, tuple[float, float, float, float]]


@dataclass
class Step:
    """A batch: when its step began, when it was taken and trained; tokens executed until it was taken and in it; the
    seconds its longest sample needs at least; and how many steps its oldest tokens lag."""

    began: float
    taken: float
    trained: float
    executed: float
    kept_tokens: int
    longest_s: float
    lag: int


@dataclass
class Run:
    """What a simulation saw."""

    steps: list[Step] = field(default_factory=list)
    executed: float = 0.0  # tokens
    lengths: list[int] = field(default_factory=list)  # tokens of every sample whose end was reported
    admitted: int = 0
    kept: int = 0
    dropped: int = 0
    held: int = 0
    stale_wait_s: float = 0.0  # how long an idle trainer had enough groups and waited for older ones
    stats: Stats = field(default_factory=dict)

    @property
    def time(self) -> float:
        return self.steps[-1].trained

    @property
    def rollout_s(self) -> float:
        """Mean seconds from the start of a step to its batch."""
        return sum(step.taken - step.began for step in self.steps) / len(self.steps)

    def count(self, name: str) -> float:
        """Sum of one of the scheduler's metrics over the run."""
        return self.stats.get(f"scheduler/{name}", (0.0,) * 4)[0]


@dataclass
class _Sample:
    """A sample a replica holds."""

    replica: int
    turn: int = 0
    tokens: int = 0
    least_s: float = 0.0  # seconds it needs at least, alone on the fastest replica


class Simulation:
    """One run. `scheduler`: makes the scheduler from its settings and the replicas' capacities."""

    def __init__(
        self,
        world: World,
        config: SchedulerConfig,
        training: Training,
        seed: int = 0,
        scheduler: Callable[[SchedulerConfig, Mapping[int, int]], RolloutScheduler] = RolloutScheduler,
    ):
        self._world, self._training, self._outcomes = world, training, Outcomes(world, seed)
        self._engines = [Engine(world, name) for name in range(world.replicas)]
        capacity = world.slots * world.requests_per_slot
        self._scheduler = scheduler(config, dict.fromkeys(range(world.replicas), capacity))
        self._samples: dict[int, _Sample] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._stamps = [0] * world.replicas  # the agenda's only valid entry of each engine
        self._numbers = 0
        self._arrived: list[events.SchedulerEvent] = []
        self._now, self._began, self._next_uid, self._version = 0.0, 0.0, 0, 0
        self._training_now = False
        self._planned, self._waits = 0.0, False
        self._run = Run()

    def run(self) -> Run:
        """Train `training.steps` steps. RolloutExhausted as the scheduler raises it, or if nothing is left to do."""
        if self._world.told_pace:
            self._arrived += [events.SpeedChanged(name, 1 / factor) for name, factor in self._world.slowness]
        self._scheduler.begin_step(0, self._training.need)
        while len(self._run.steps) < self._training.steps or self._training_now:
            self._plan()
            while self._scheduler.num_wanted():  # a real replica reports after every burst, so that this is soon heard
                self._plan()
            if not self._training_now and self._scheduler.ready():
                self._take()
                continue
            if not self._agenda:
                raise self._scheduler.exhausted("nothing is on its way")
            self._now = self._agenda[0][0]
            while self._agenda and self._agenda[0][0] <= self._now:
                heapq.heappop(self._agenda)[2]()
        run = self._run
        run.executed = self._executed()
        run.held = len(self._samples)
        run.stats = self._scheduler.metrics()
        assert run.admitted == run.kept + run.dropped + run.held, "a sample was lost"
        return run

    # -- the scheduler's side

    def _plan(self) -> None:
        fresh = range(self._next_uid, self._next_uid + self._scheduler.num_wanted())
        self._next_uid += len(fresh)
        self._scheduler.add_prompts(fresh)
        self._run.stale_wait_s += self._waits * (self._now - self._planned)
        self._planned = self._now
        arrived, self._arrived = self._arrived, []
        for command in self._scheduler.plan(arrived):
            self._carry_out(command)
        idle = self._scheduler.generates_ahead and not self._training_now and not self._scheduler.ready()
        num_valid = len(self._scheduler._selection.valid)  # finished() would copy them
        self._waits = idle and num_valid >= self._training.need

    def _carry_out(self, command: events.SchedulerCommand) -> None:
        engine = self._engines[command.replica]
        self._catch_up(engine)
        match command:
            case events.Generate():
                for i in command.sample_ids:
                    assert i not in self._samples, f"sample {i} is admitted twice"
                    self._samples[i] = _Sample(command.replica)
                self._run.admitted += len(command.sample_ids)
                self._start(engine, command.sample_ids)
            case events.Continue():
                self._start(engine, command.sample_ids)
            case events.Drop():
                for i in command.sample_ids:
                    assert self._samples.pop(i).replica == command.replica
                self._run.dropped += len(command.sample_ids)
                if cut := engine.drop(command.sample_ids):
                    self._arrived.append(events.Aborted(cut))
            case events.SendToScorer():
                raise AssertionError("no scorer is lost here")
        assert engine.num_requests <= self._world.slots * self._world.requests_per_slot
        self._reschedule(command.replica)

    def _start(self, engine: Engine, sample_ids: tuple[int, ...]) -> None:
        engine.add([Request(i, self._outcomes.tokens(i, self._samples[i].turn)) for i in sample_ids])

    # -- the world's side

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._agenda, (time, self._numbers, action))

    def _catch_up(self, engine: Engine) -> None:
        if engine.time < self._now:
            engine.advance(self._now)

    def _reschedule(self, name: int) -> None:
        self._stamps[name] += 1
        time, stamp = self._engines[name].next_time(), self._stamps[name]
        if time < math.inf:
            self._at(time, lambda: self._engine_event(name, stamp))

    def _engine_event(self, name: int, stamp: int) -> None:
        if stamp != self._stamps[name]:
            return
        engine = self._engines[name]
        engine.advance(self._now)
        if ended := engine.reported():
            self._ended(name, ended)
        self._reschedule(name)

    def _ended(self, name: int, ended: list[int]) -> None:
        world = self._world
        finished, turns = [], []
        for i in ended:
            sample = self._samples.get(i)
            if sample is None:
                continue  # dropped between its end and the end of the burst
            tokens = self._outcomes.tokens(i, sample.turn)
            sample.tokens += tokens
            sample.least_s += tokens * world.fastest_token_s
            if world.environment is not None:
                turns.append((i, sample.tokens))
                self._act(i, sample)
            else:
                finished.append((i, sample.tokens, FinishReason.STOP))
                self._run.lengths.append(sample.tokens)
                self._later(i, self._outcomes.reward_s(i), self._score(i))
        self._arrived.append(events.Decoded(name, tuple(finished), tuple(turns)))

    def _act(self, i: int, sample: _Sample) -> None:
        seconds = self._outcomes.environment_s(i, sample.turn)
        sample.turn += 1
        assert self._world.environment is not None
        if seconds == math.inf:
            self._later(
                i, self._world.environment.timeout_s, events.SamplesFailed((i,), "the environment does not answer")
            )
        elif sample.turn < self._world.turns:
            self._later(i, seconds, events.Answered((i,)))
        else:
            self._run.lengths.append(sample.tokens)
            self._later(i, seconds + self._outcomes.reward_s(i), self._score(i))

    def _score(self, i: int) -> events.Rewarded:
        score = self._outcomes.score(i)
        return events.Rewarded(i, score, score)

    def _later(self, i: int, seconds: float, event: events.SchedulerEvent) -> None:
        def arrive() -> None:
            if i in self._samples:
                self._arrived.append(event)

        self._samples[i].least_s += seconds
        self._at(self._now + seconds, arrive)

    # -- the trainer's side

    def _take(self) -> None:
        assert len(self._scheduler._open) + len(self._scheduler.finished()) <= self._scheduler.budget
        batch = self._scheduler.take_batch()
        samples = [self._samples.pop(sample.id) for group in batch for sample in group.samples]
        self._run.kept += len(samples)
        self._scheduler.ended_prompts()
        trained = self._now + self._training.train_s
        self._run.steps.append(
            Step(
                began=self._began,
                taken=self._now,
                trained=trained,
                executed=self._executed(),
                kept_tokens=sum(sample.tokens for sample in samples),
                longest_s=max(sample.least_s for sample in samples),
                lag=self._version - min(group.version for group in batch),
            )
        )
        self._training_now = True
        if not self._training.overlap:
            self._pause()
        self._at(trained, self._publish)

    def _publish(self) -> None:
        self._pause()
        self._at(self._now + self._training.publish_s, self._begin)

    def _begin(self) -> None:
        for name, engine in enumerate(self._engines):
            self._catch_up(engine)
            engine.resume()
            self._reschedule(name)
        self._version += 1
        self._training_now, self._began = False, self._now
        self._scheduler.begin_step(self._version, self._training.need)

    def _pause(self) -> None:
        for name, engine in enumerate(self._engines):
            self._catch_up(engine)
            engine.pause()
            self._reschedule(name)

    def _executed(self) -> float:
        for engine in self._engines:
            self._catch_up(engine)
        return sum(engine.executed for engine in self._engines)
