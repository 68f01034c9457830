"""Scoring without blocking: cheap rewards at once, other rewards in worker processes.

If a reward raises, hangs, kills its process or gives no number, only that sample fails: Score(0, 0, error=...).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hpcrl.config import Config, RewardConfig
from hpcrl.rewards.reward import Reward, RewardItem, Score, make_reward
from hpcrl.rewards.services import NOBODY, Services
from hpcrl.rewards.serving.guarded import describe, failed, score_each
from hpcrl.rewards.serving.protocol import Answer, Begin, Ready, content_of, pack, pack_chunk, take_answers, to_message
from hpcrl.rewards.serving.router import Router
from hpcrl.spec.tables import REWARDS
from hpcrl.system.clock import AwakeClock
from hpcrl.system.signals import held_back

CHUNK_BYTES = 64 << 20  # maximum size of a message's images, unless its first response has more
CHUNK = 128  # maximum responses in a message; a worker needs several to stay busy while its rank is busy
BATCH = 16  # maximum responses in a call of a batched reward
START_TIMEOUT_S = 120.0
MAX_STARTS = 3  # consecutive failed starts
READ_BYTES = 1 << 16
KNOWN_SCORES = 4096  # cached scores of a pure reward, for later equal responses

Clock = Callable[[], float]


class RewardPool:
    """Scores a rank's responses; no call waits for a reward. Create it on the main thread: Linux kills the workers when
    the thread that started them ends."""

    def __init__(
        self,
        config: Config,
        clock: Clock = time.monotonic,
        services: Services = NOBODY,
        domain: str | None = None,
        elsewhere: Collection[str] = (),
    ):
        """ValueError if a built-in reward cannot be created from its section; workers start in the background.

        Args:
            clock: The host's clock. Of the time between two polls, AwakeClock counts at most a quarter of a timeout.
            domain: The only domain that is scored here. None means all domains except `elsewhere`.
        """
        self._router = Router(config).restricted(domain, elsewhere)
        self._inline: dict[str, Reward] = {}
        self._crews: dict[str, _Crew] = {}
        self._keys: dict[str, str] = {}  # domain -> section of its reward, the key of rewards and crews
        self._done: list[tuple[RewardItem, Score]] = []
        self._counts: Counter[str] = Counter()
        for name, section in self._router.sections.items():
            reward = make_reward(section) if not REWARDS[section.name].imports_code else None
            key = section.model_dump_json()
            if reward is not None and reward.inline:
                self._inline[key] = reward
            elif key not in self._crews:
                asks = any(REWARDS[section.name].asks(section.options))
                self._crews[key] = _Crew(name, section, clock, services if asks else NOBODY)

    def scores(self, domain: str) -> Literal["samples", "groups"] | None:
        """Whether the domain's reward scores samples or groups; None while it loads. ValueError if there is none."""
        key = self._key(domain)
        return self._inline[key].scores if key in self._inline else self._crews[key].scores

    def submit(self, items: Sequence[RewardItem]) -> None:
        """Accept responses to score individually. ValueError names a domain without a reward."""
        for item in items:
            self.submit_group([item])

    def submit_group(self, items: Sequence[RewardItem]) -> None:
        """Accept the members of one group, for a reward that scores groups."""
        key = self._key(items[0].domain)
        if key in self._inline:
            scores = score_each(self._inline[key], items)
            assert scores is not None
            self._done += zip(items, scores, strict=True)
        else:
            self._crews[key].add(items)

    def _key(self, domain: str) -> str:
        key = self._keys.get(domain)
        if key is None:
            key = self._keys[domain] = self._router.of(domain).model_dump_json()
        return key

    def poll(self) -> list[tuple[int, Score]]:
        """(sample id, score) of responses scored since the last call. RuntimeError if a worker does not start."""
        done, self._done = self._done, []
        for crew in self._crews.values():
            done += crew.pump()
        self._counts["scored"] += len(done)
        self._counts["errors"] += sum(bool(score.error) for _, score in done)
        return [(item.sample_id, self._with_its_place(item, score)) for item, score in done]

    def _with_its_place(self, item: RewardItem, score: Score) -> Score:
        """The score; an error also names domain and reward."""
        if not score.error:
            return score
        section = self._router.of(item.domain)
        return replace(score, error=f"{score.error} (domain {item.domain}, reward {section.function or section.name})")

    @property
    def pending(self) -> int:
        """Responses submitted and not yet returned by poll()."""
        return len(self._done) + sum(crew.pending for crew in self._crews.values())

    def stats(self) -> dict[str, int]:
        """Counts since the start: scored, errors (timeouts and dead workers included), timeouts, restarts, and equal:
        responses that got the score of an equal response."""
        total = self._counts.copy()
        for crew in self._crews.values():
            total += crew.counts
        return {name: total[name] for name in ("scored", "errors", "timeouts", "restarts", "equal")}

    def close(self) -> None:
        """Kill the workers and reap them (idempotent); pending responses are lost."""
        for crew in self._crews.values():
            crew.close()


@dataclass(slots=True, eq=False)
class _Job:
    """The unit of one call: a response, or a group. Images are encoded when a worker gets the job."""

    items: Sequence[RewardItem]
    messages: list[bytes]  # without images
    alone: bool = False  # to be called separately, after a call or process with several jobs failed
    content: bytes = b""  # of a response to a pure reward
    equal: list[RewardItem] = field(default_factory=list)  # responses with this content, which get its score

    @property
    def image_bytes(self) -> int:
        return sum(len(image.content) for item in self.items for image in item.images)


class _Crew:
    """The workers of one reward, and the responses that wait for them."""

    def __init__(self, name: str, section: RewardConfig, clock: Clock, services: Services):
        self.counts: Counter[str] = Counter()
        self.scores: Literal["samples", "groups"] | None = None
        self._name = name
        self._section = section
        self._clock = clock
        self.pending = 0
        self._pure = False
        self._arrived: deque[_Job] = deque()  # not yet compared with other responses
        self._waiting: deque[_Job] = deque()
        self._open: dict[bytes, _Job] = {}  # of a pure reward, by content
        self._known: dict[bytes, Score] = {}  # the least recently used first
        self._done: list[tuple[RewardItem, Score]] = []
        self._failed_starts = 0
        self._services = services
        self._workers = [_Worker(section, clock, services) for _ in range(section.num_processes)]

    def add(self, items: Sequence[RewardItem]) -> None:
        self.pending += len(items)
        try:
            messages = [to_message(item) for item in items]
        except Exception as error:  # a value of the row that msgpack cannot encode
            self._done += [(item, failed(describe(error))) for item in items]
            return
        self._arrived.append(_Job(items, messages))

    def pump(self) -> list[tuple[RewardItem, Score]]:
        while self._arrived and self.scores is not None:
            job = self._arrived.popleft()
            if not self._pure or not self._has_equal(job):
                self._waiting.append(job)
        for place, worker in enumerate(self._workers):
            self._receive(worker)
            while self._waiting and worker.has_room and not (self._waiting[0].alone and worker.at_work):
                worker.send(self._next_chunk(worker))
            worker.flush()
            problem = worker.problem()
            if problem:
                self._workers[place] = self._replace(worker, problem)
        done, self._done = self._done, []
        self.pending -= len(done)
        return done

    def _has_equal(self, job: _Job) -> bool:
        """Whether an equal response is scored or pending, in which case the job needs no call."""
        (item,), (message,) = job.items, job.messages
        job.content = content_of(item, message)
        if (score := self._known.pop(job.content, None)) is not None:
            self._known[job.content] = score
            self._done.append((item, score))
        elif (other := self._open.get(job.content)) is not None:
            other.equal.append(item)
        else:
            self._open[job.content] = job
            return False
        self.counts["equal"] += 1
        return True

    def _receive(self, worker: _Worker) -> None:
        for answer in worker.receive():
            if isinstance(answer, Ready):
                if answer.error:
                    raise RuntimeError(f"reward {self._name}: {answer.error}")
                self._failed_starts = 0
                self.scores, self._pure = answer.scores, answer.pure and answer.scores == "samples"
                worker.ready = answer
            elif answer.place is None:
                self._retry(job for job, _ in worker.take_jobs())
            else:
                self.counts["timeouts"] += answer.error.startswith("timeout after")
                parts = tuple(answer.turn_rewards), answer.token_rewards
                score = Score(answer.reward, answer.score, answer.error, answer.metrics, *parts, answer.extracted)
                self._finish(*worker.at_work.pop(answer.place), score)
            worker.heard()

    def _next_chunk(self, worker: _Worker) -> list[_Job]:
        chunk = [self._waiting.popleft()]
        if chunk[0].alone or worker.several or self.scores == "groups":
            return chunk
        fair = -(-(len(self._waiting) + 1) // len(self._workers))
        most = min(BATCH if worker.batched else CHUNK, fair)
        num_bytes = chunk[0].image_bytes
        while len(chunk) < most and not self._waiting[0].alone:
            num_bytes += self._waiting[0].image_bytes
            if num_bytes > CHUNK_BYTES:
                break
            chunk.append(self._waiting.popleft())
        return chunk

    def _replace(self, worker: _Worker, problem: str) -> _Worker:
        """Kill a worker; its current call gets the error, other calls return to the head of the queue."""
        worker.kill()
        self.counts["restarts"] += 1
        if not worker.started:
            self._failed_starts += 1
            if self._failed_starts == MAX_STARTS:
                raise RuntimeError(f"reward {self._name}: no worker started in {MAX_STARTS} attempts: {problem}")
        jobs = worker.take_jobs()
        if (worker.batched or worker.several) and len(jobs) > 1:  # separate calls identify the job that failed
            charged = [(job, left) for job, left in jobs if len(left) < len(job.items)]
            self._retry(job for job, left in jobs if len(left) == len(job.items))
        else:
            charged = jobs[:1]
            self._waiting.extendleft(job for job, _ in reversed(jobs[1:]))
            self.counts["timeouts"] += bool(charged) and worker.timed_out
        for job, left in charged:
            for item in left:
                self._finish(item, job, failed(problem))
        return _Worker(self._section, self._clock, self._services)

    def _retry(self, jobs: Iterable[_Job]) -> None:
        self._waiting.extendleft(reversed([replace(job, alone=True) for job in jobs]))

    def _finish(self, item: RewardItem, job: _Job, score: Score) -> None:
        self._done += [(each, score) for each in (item, *job.equal)]
        if job.content:
            del self._open[job.content]
            if not score.error:
                self._known[job.content] = score
            if len(self._known) > KNOWN_SCORES:
                del self._known[next(iter(self._known))]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()


class _Worker:
    """A worker process, its pipes, and the jobs that were sent to it."""

    def __init__(self, section: RewardConfig, clock: Clock, services: Services):
        self._timeout_s = section.timeout_s
        self._concurrency = section.concurrency
        with held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hpcrl.rewards.serving.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # its own group, so a kill includes child processes of user code
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self._out = bytearray(pack(Begin(section.model_dump_json(), services)))
        self._in = bytearray()
        self._gone = False
        self._sent = 0
        self.at_work: dict[int, tuple[RewardItem, _Job]] = {}
        self.ready: Ready | None = None
        self.timed_out = False
        self._host_clock = clock
        self._limit(START_TIMEOUT_S)

    @property
    def started(self) -> bool:
        return self.ready is not None

    @property
    def batched(self) -> bool:
        return self.ready is not None and self.ready.batched and self.ready.scores == "samples"

    @property
    def several(self) -> bool:
        """Whether the process runs several calls at once."""
        return self.ready is not None and self.ready.pool == "async"

    @property
    def has_room(self) -> bool:
        if not self.several:
            return self.started and not self.at_work
        jobs = {id(job): job for _, job in self.at_work.values()}
        return len(jobs) < self._concurrency and not any(job.alone for job in jobs.values())

    def _limit(self, seconds: float) -> None:
        """Set the deadline to this many seconds from now."""
        self._limit_s, self._clock = seconds, AwakeClock(seconds, self._host_clock)

    def heard(self) -> None:
        """Record progress: the time for the next response begins. Concurrent calls have their own timeouts in the
        process; if none of them answers for twice the timeout, the process is stuck."""
        self._limit(self._timeout_s * (2 if self.several else 1))

    def send(self, chunk: list[_Job]) -> None:
        if not self.at_work:
            self.heard()
        for job in chunk:
            for item in job.items:
                self.at_work[self._sent] = item, job
                self._sent += 1
        items = [item for job in chunk for item in job.items]
        self._out += pack_chunk(items, [message for job in chunk for message in job.messages])

    def take_jobs(self) -> list[tuple[_Job, list[RewardItem]]]:
        """Jobs that were sent but not answered, in order: (job, its responses without a score)."""
        left: dict[int, tuple[_Job, list[RewardItem]]] = {}
        for item, job in self.at_work.values():
            left.setdefault(id(job), (job, []))[1].append(item)
        self.at_work = {}
        return list(left.values())

    def flush(self) -> None:
        """Write as much as the pipe accepts. The time for a response begins when the worker has received it."""
        while self._out:
            try:
                del self._out[: os.write(self._stdin, self._out)]
            except BlockingIOError:
                return
            except BrokenPipeError:  # the process has ended; receive() detects it
                self._out.clear()
            if self.started and not self.several:
                self.heard()

    def receive(self) -> list[Answer]:
        """The answers that have arrived."""
        # Checked before the last read, so output before the end is not lost; not reaped, so the process id cannot be
        # reused before kill().
        self._gone = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        try:
            while block := os.read(self._stdout, READ_BYTES):
                self._in += block
        except BlockingIOError:
            pass
        return take_answers(self._in)

    def problem(self) -> str | None:
        """Why this process must be replaced, or None."""
        if self._gone:
            code = self.kill()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return f"the reward's process ended {how}"
        if self._clock.now() > self._limit_s and (self.at_work or not self.started):
            self.timed_out = self.started
            stuck = " (its code blocks the event loop)" if self.several else ""
            return (
                f"timeout after {self._timeout_s:g} s{stuck}" if self.started else f"no start in {START_TIMEOUT_S:g} s"
            )
        return None

    def kill(self) -> int:
        """End the process and its group, and reap it (idempotent); returns its exit code, negative for a signal."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        return self._process.returncode
