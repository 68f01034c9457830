"""Ranks that answer a rollout loop like real ones, in one process and without a clock."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcrl.messaging import messages as m
from hpcrl.rollout.types import split_sample_id

SCORER = 2


class Ranks:
    """Generators and a reward rank behind the controller's interface. A response takes `bursts` decode chunks; `score`
    gives (reward, error) or (reward, error, extracted answer), after all decode chunks. Waiting for events while
    nothing is in progress would never end, so it is an error. With env ranks prompts of even uids are not scored at
    their end."""

    def __init__(self, bursts: Callable[[int], int] = lambda uid: 1, score: Callable[[int], Any] = lambda _: (1.0, "")):
        self._bursts, self._score = bursts, score
        self._running: defaultdict[int, dict[int, int]] = defaultdict(dict)  # rank -> sample -> remaining decode chunks
        self._events: deque[tuple[int, m.Event]] = deque()
        self._scores: deque[tuple[int, m.Event]] = deque()
        self._seq = 0
        self.lost: set[int] = set()
        self.command_s = 20.0
        self.sent: list[tuple[int, m.Command]] = []  # rank, command

    def send(self, rank: int, command: m.Command) -> int:
        self._seq += 1
        self.sent.append((rank, command))
        running = self._running[rank]
        match command:
            case m.Admit():
                running |= {sample: self._bursts(split_sample_id(sample)[0]) for sample, _ in command.samples}
            case m.DecodeChunk():
                for sample in running:
                    running[sample] -= 1
                ended = [sample for sample, left in running.items() if left <= 0]
                self._done(rank, ended, "stop")
                if ended := [sample for sample in ended if not command.envs or split_sample_id(sample)[0] % 2]:
                    self._scores.append((SCORER, m.Scored(list(map(self._scored, ended)))))
            case m.AbortSamples():
                self._done(rank, [sample for sample in command.samples if sample in running], "abort")
        return self._seq

    def events(self) -> list[tuple[int, m.Event]]:
        source = self._events or self._scores
        assert source, "waits for ever"
        events = list(source)
        source.clear()
        return events

    def call(self, commands: Mapping[int, m.Command]) -> dict[int, m.Done]:
        texts = {
            rank: [f"text {sample}" for sample in command.samples]
            for rank, command in commands.items()
            if isinstance(command, m.ReadTexts)
        }
        return {rank: m.Done(self.send(rank, command), texts=texts.get(rank, [])) for rank, command in commands.items()}

    def drop_ranks(self, ranks: Sequence[int], cause: str) -> None:
        self.lost |= set(ranks)

    def say(self, rank: int, event: m.Event) -> None:
        self._events.append((rank, event))

    def _scored(self, sample: int) -> m.ScoredSample:
        reward, error, *extracted = self._score(sample)
        return m.ScoredSample(sample, reward, reward, error, extracted=extracted[0] if extracted else None)

    def _done(self, rank: int, samples: list[int], reason: str) -> None:
        for sample in samples:
            del self._running[rank][sample]
        ended = [m.Ended(sample, 10 + split_sample_id(sample)[0] % 7, 4, reason) for sample in samples]
        self.say(rank, m.DecodeChunkDone(self._seq, ended, [], 4, 0.1))
