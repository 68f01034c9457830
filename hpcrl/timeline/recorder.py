"""The recorder of a run's timeline on rank 0: which command every rank executed when, and the life of every sample.

Recording appends a tuple to a list; times are converted and written by another thread (hpcrl.timeline.writer). No call
waits, sends a message or synchronises a device. The number of rows per rank and per step is limited, and rows beyond
the limits are counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hpcrl.timeline.host_clocks import HostClock, HostClocks
from hpcrl.timeline.step_file import (
    FORMAT,
    ChunkRow,
    ClockHeader,
    CommandRow,
    RankHeader,
    SampleRow,
    StepHeader,
    StepTimeline,
    WaitRow,
    WorkRow,
)

MAX_ROWS_OF_RANK = 20_000
MAX_ROWS = 200_000
"""Maximum rows of one step, of a rank and of all ranks."""
MAX_SAMPLES = 100_000
"""Maximum samples that are neither trained nor dropped, samples of one step, and prompts whose drawing is recorded."""
MAX_SENT = 100_000
"""Maximum commands that were sent and not reported yet."""
OF_WAITS, OF_SAMPLES = -1, -2
"""Keys of StepHeader.omitted for rows that belong to no rank."""

RankSpan = tuple[int, float, float]
"""A command's number, start and duration by the rank's clock, seconds (hpcrl.messaging.messages.Span)."""


@dataclass(slots=True)
class SampleLife:
    """A sample so far. `ended` and `scored` are (rank, time on its clock); other times are on rank 0's clock."""

    sample: int
    prompt: int
    domain: str
    replica: int
    drawn: float | None
    start: float | None
    ended: tuple[int, float] | None = None
    scored: tuple[int, float] | None = None
    tokens: int = 0
    turns: int = 0
    fate: str = ""
    lag: int | None = None
    done: float = 0.0


@dataclass
class RecordedStep:
    """A step as recorded, with times on the clocks of the ranks. `hosts` and `clocks` are for their conversion."""

    step: int
    began: float
    began_at: float  # Unix time
    ended: float = 0.0
    complete: bool = True
    commands: list[tuple[int, str, RankSpan, tuple[int, int, int] | None]] = field(default_factory=list)
    works: list[tuple[str, int, int, str, float, float]] = field(default_factory=list)
    waits: list[tuple[str, float, float]] = field(default_factory=list)
    samples: list[SampleLife] = field(default_factory=list)
    outcomes: dict[int, str] = field(default_factory=dict)  # prompt -> why its samples are not trained
    rows: Counter[int] = field(default_factory=Counter)
    omitted: Counter[int] = field(default_factory=Counter)
    open_samples: int = 0
    roles: Sequence[Sequence[str]] = ()
    hosts: dict[int, str] = field(default_factory=dict)
    clocks: dict[str, HostClock] = field(default_factory=dict)

    def admits(self, rank: int) -> bool:
        """Whether another row of this rank fits; otherwise it counts as omitted."""
        fits = self.rows[rank] < MAX_ROWS_OF_RANK and len(self.commands) + len(self.works) < MAX_ROWS
        (self.rows if fits else self.omitted)[rank] += 1
        return fits

    def converted(self) -> StepTimeline:
        """The step with all times on rank 0's clock."""
        clocks = {rank: self.clocks.get(host) for rank, host in self.hosts.items()}
        offsets = {rank: clock.offset_s if clock is not None else 0.0 for rank, clock in clocks.items()}

        def at(rank: int, seconds: float) -> int:
            return round((seconds + offsets.get(rank, 0.0) - self.began) * 1e6)

        ranks = [RankHeader(rank, self.hosts.get(rank, ""), list(roles)) for rank, roles in enumerate(self.roles)]
        hosts = {
            host: ClockHeader(clock.offset_s, clock.error_s)
            if (clock := self.clocks.get(host)) is not None
            else ClockHeader(0.0, None)
            for host in sorted({*self.hosts.values()})
        }
        seconds, omitted = self.ended - self.began, dict(self.omitted)
        begin = FORMAT, self.step, self.began_at, seconds, self.complete
        step = StepTimeline(StepHeader(*begin, ranks, hosts, omitted, self.open_samples))
        for rank, name, (number, start, lasted), counts in self.commands:
            span = number, at(rank, start), max(0, round(lasted * 1e6))
            if counts is None:
                step.commands.append(CommandRow(rank, name, *span))
            else:
                step.chunks.append(ChunkRow(rank, *span, *counts))
        step.works = [
            WorkRow(what, rank, sample, domain, at(rank, start), max(0, round((end - start) * 1e6)))
            for what, rank, sample, domain, start, end in self.works
        ]
        step.waits = [WaitRow(what, at(0, start), round((end - start) * 1e6)) for what, start, end in self.waits]
        step.samples = [self._converted_sample(life, at) for life in self.samples]
        return step

    def _converted_sample(self, life: SampleLife, at: Callable[[int, float], int]) -> SampleRow:
        """The sample with times in order: errors of the clocks' offsets must not turn it around."""
        done = at(0, life.done)
        drawn, start = (None if each is None else at(0, each) for each in (life.drawn, life.start))
        floor = max((each for each in (drawn, start) if each is not None), default=None)
        end = None if life.ended is None else min(at(*life.ended), done)
        scored = None if life.scored is None else min(at(*life.scored), done)
        if end is not None:
            end = end if floor is None else max(floor, end)
            scored = None if scored is None else max(end, scored)
        fate = self.outcomes.get(life.prompt, life.fate) if life.fate == "dropped" else life.fate
        told = life.sample, life.prompt, life.domain, life.replica, fate, life.lag, life.tokens, life.turns
        return SampleRow(*told, drawn, start, end, scored, done)


class StepWriter(Protocol):
    """Takes recorded steps (hpcrl.timeline.writer.TimelineWriter)."""

    def put(self, step: RecordedStep) -> None:
        """Take a step; must not wait."""

    def close(self, within_s: float) -> None:
        """Wait at most this many seconds until the steps are written."""


class Recorder:
    """One per run, on rank 0, called by its main thread only."""

    def __init__(self, roles: Sequence[Sequence[str]], host: str, writer: StepWriter):
        """`roles` are the roles of every rank, `host` is rank 0's."""
        self._roles, self._writer = roles, writer
        self._clocks = HostClocks(host)
        self._hosts: dict[int, str] = {}
        self._sent: dict[tuple[int, int], tuple[str, float]] = {}
        self._drawn: dict[int, tuple[str, float | None]] = {}  # prompt -> its domain, and when it was drawn
        self._open: dict[int, SampleLife] = {}
        self._step: RecordedStep | None = None

    # -- steps

    def begin(self, step: int) -> None:
        """Begin a step; the previous one has ended."""
        self.end()
        self._step = RecordedStep(step, time.monotonic(), time.time(), roles=self._roles)

    def end(self, complete: bool = True) -> None:
        """End the step, if one has begun, and have it written."""
        recorded, self._step = self._step, None
        if recorded is None:
            return
        ended, clocks, hosts = time.monotonic(), self._clocks.take(), dict(self._hosts)
        found: dict[str, Any] = {"clocks": clocks, "hosts": hosts, "open_samples": len(self._open)}
        self._writer.put(replace(recorded, ended=ended, complete=complete, **found))

    def discard_after(self, step: int) -> None:
        """Forget the step that has begun if it is after `step`, the run's last one."""
        if self._step is not None and self._step.step > step:
            self._step = None

    def close(self, within_s: float) -> None:
        """End the step in which the run ends, if it is in one, and wait at most this many seconds for the writer."""
        self.end(complete=False)
        self._writer.close(within_s)

    # -- ranks

    def joined(self, rank: int, host: str) -> None:
        """A rank has joined the world."""
        self._hosts[rank] = host

    def sent(self, rank: int, number: int, name: str, at: float) -> None:
        """A command was sent to a rank, at this time or later."""
        self._sent[rank, number] = name, at
        if len(self._sent) > MAX_SENT:
            del self._sent[next(iter(self._sent))]

    def executed(self, rank: int, spans: Iterable[RankSpan], chunk: tuple[int, int, int, int] | None = None) -> None:
        """A rank has reported the commands that it executed. `chunk` are the number, tokens, running and queued
        requests of a decode chunk among them."""
        received, step = time.monotonic(), self._step
        host = self._hosts.get(rank, "")
        for number, start, seconds in spans:
            name, sent = self._sent.pop((rank, number), ("?", None))
            if sent is not None:
                self._clocks.heard(host, sent, start, start + seconds, received)
            if step is not None and step.admits(rank):
                counts = chunk[1:] if chunk is not None and chunk[0] == number and name == "DecodeChunk" else None
                step.commands.append((rank, name, (number, start, seconds), counts))

    def waited(self, what: str, start: float) -> None:
        """The pipeline has waited for `what` since `start`."""
        if self._step is None:
            return
        if len(self._step.waits) < MAX_ROWS_OF_RANK:
            self._step.waits.append((what, start, time.monotonic()))
        else:
            self._step.omitted[OF_WAITS] += 1

    # -- samples

    def drawn(self, prompts: Iterable[tuple[int, str]]) -> None:
        """Prompts (number, domain) were drawn from the data."""
        now = time.monotonic()
        self._drawn.update((prompt, (domain, now)) for prompt, domain in prompts)
        while len(self._drawn) > MAX_SAMPLES:
            del self._drawn[next(iter(self._drawn))]

    def restored(self, prompts: Iterable[tuple[int, str]], samples: Iterable[tuple[int, int, int, int]]) -> None:
        """Open prompts (number, domain), and finished samples (id, prompt, replica, tokens), come from a checkpoint."""
        self._drawn.update((prompt, (domain, None)) for prompt, domain in prompts)
        for sample, prompt, replica, tokens in samples:
            domain, drawn = self._drawn.get(prompt, ("", None))
            self._open[sample] = SampleLife(sample, prompt, domain, replica, drawn, None, tokens=tokens)

    def admitted(self, replica: int, samples: Iterable[tuple[int, int]]) -> None:
        """Samples (id, prompt) were sent to a replica."""
        now = time.monotonic()
        for sample, prompt in samples:
            if len(self._open) < MAX_SAMPLES:
                domain, drawn = self._drawn.get(prompt, ("", None))
                self._open[sample] = SampleLife(sample, prompt, domain, replica, drawn, now)
            elif self._step is not None:
                self._step.omitted[OF_SAMPLES] += 1

    def decoded(self, rank: int, at: float, samples: Iterable[tuple[int, int]]) -> None:
        """Samples' (id, tokens so far) turns ended on a generator rank, at this time of its clock."""
        for sample, tokens in samples:
            if (life := self._open.get(sample)) is not None and at:
                life.ended, life.tokens, life.turns = (rank, at), tokens, life.turns + 1

    def worked(self, what: str, rank: int, sample: int, start: float, end: float, final: bool) -> None:
        """A rank has scored a sample (`reward`) or played a turn of its environment (`turn`), by its clock. `final`:
        the sample has its reward."""
        if not end:
            return
        life, step = self._open.get(sample), self._step
        if step is not None and step.admits(rank):
            step.works.append((what, rank, sample, life.domain if life is not None else "", start, end))
        if final and life is not None:
            life.scored = rank, end

    def closed(self, samples: Iterable[int], fate: str, lag: int | None = None) -> None:
        """Samples have ended (SampleRow.fate)."""
        now, step = time.monotonic(), self._step
        for sample in samples:
            if (life := self._open.pop(sample, None)) is None or step is None:
                continue
            life.fate, life.lag, life.done = fate, lag, now
            if len(step.samples) < MAX_SAMPLES:
                step.samples.append(life)
            else:
                step.omitted[OF_SAMPLES] += 1

    def lost_replica(self, replica: int) -> None:
        """A replica is lost with all of its samples."""
        self.closed([sample for sample, life in self._open.items() if life.replica == replica], "lost")

    def prompt_ended(self, prompt: int, outcome: str) -> None:
        """A prompt has ended: trained, filtered, failed or too long."""
        self._drawn.pop(prompt, None)
        if self._step is not None and outcome != "trained":
            self._step.outcomes[prompt] = str(outcome)
