"""The teacher role with the model of an endpoint: the rank has no engine, and asks for the log-probs of its rows."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hpcrl.comm.data_parallel import DataParallel
from hpcrl.engines.expert_routes import routes_of
from hpcrl.engines.train.training_engine import TrainEngine
from hpcrl.messaging.messages import Done, Teach
from hpcrl.metrics.stats import Stat
from hpcrl.models.families import vision_of
from hpcrl.rewards.serving.endpoint import EndpointError
from hpcrl.rollout.batch import Batch
from hpcrl.workers.endpoint_answers import ZERO_PROBABILITY, Told
from hpcrl.workers.endpoint_probe import probe
from hpcrl.workers.prompt_logprobs import PromptLogprobs
from hpcrl.workers.role import Rank
from hpcrl.workers.teacher import UNKNOWN, TeacherRole

SHARE = 0.9
"""Share of a command's time after which a batch without all answers ends the run, so the error names the endpoint."""


def make_teacher(worker: Rank) -> TeacherRole:
    """The teacher of this run on this rank."""
    return TeacherRole(worker) if worker.config.teacher_endpoint is None else EndpointTeacher(worker)


class EndpointTeacher(TeacherRole):
    """The model at teacher.endpoint. Of the ranks with the same rows, the one that would hold outputs asks."""

    def __init__(self, worker: Rank):
        """ValueError if the endpoint's model cannot be the teacher (hpcrl.workers.endpoint_probe)."""
        self._worker, self._rows, config = worker, {}, worker.config
        routes_of(config, worker.model_path)  # declares the field
        vision_of(worker.model_path)  # likewise
        self._ranks = DataParallel(worker.world, self.name, worker.layout.division(self.name))
        given = config.teacher_endpoint
        assert given is not None and given.model is not None, "checked before the start"
        longest = config.of_teacher().max_sequence_tokens
        k = config.teacher.top_k if config.teacher.form == "top_k" else 0
        self._given, self._endpoint = given, PromptLogprobs(given, k, longest)
        self._num_known = max(worker.tokenizer.get_vocab().values()) + 1
        if self._ranks.holds_outputs:
            deadline = time.monotonic() + min(given.retry_s, SHARE * config.timeouts.start_s)
            probe(self._endpoint, given.model, given.api_key_env, worker.tokenizer, longest, deadline)

    @property
    def engines(self) -> list[TrainEngine]:
        """See EngineRole. The server has the model."""
        return []

    def _teach(self, command: Teach, seq: int) -> Done:
        self._counts: Counter[str] = Counter()
        done = super()._teach(command, seq)
        if self._ranks.holds_outputs:  # merged over the ranks, the mean is the sum
            share = 1 / self._ranks.num_data_parallel
            done.stats |= {f"teacher/{name}": Stat(self._counts[name], share) for name in ("requests", "retries")}
        return done

    def _judge(self, batch: Batch, command: Teach) -> Sequence[Tensor | None]:
        """See TeacherRole. As there, a token of the policy that no text yields counts as token 0, and has UNKNOWN."""
        k = self._endpoint.k
        if not self._ranks.holds_outputs:
            return [None] if not k else [None, None]
        unknown = batch.token_ids >= self._num_known
        token_ids, mask = batch.token_ids.masked_fill(unknown, 0).tolist(), batch.loss_mask
        pieces = []  # of each segment the part up to its last trained token
        for start, end in zip(batch.cu_segments[:-1].tolist(), batch.cu_segments[1:].tolist(), strict=True):
            if len(trained := mask[start:end].nonzero()):
                pieces.append((start, start + int(trained[-1, 0]) + 1))
        told = self._ask_all([token_ids[start:end] for start, end in pieces])
        places = [slice(start + 1, end) for start, end in pieces]
        if not k:
            values = torch.zeros(batch.num_tokens)
            for place, answer in zip(places, told, strict=True):
                values[place] = torch.tensor(answer.logprobs)
            return [_possible(values).masked_fill(unknown, UNKNOWN).masked_fill(~mask, 0.0)]
        ids, values = torch.zeros(batch.num_tokens, k, dtype=torch.int32), torch.zeros(batch.num_tokens, k)
        for place, answer in zip(places, told, strict=True):
            best = torch.tensor(answer.best, dtype=torch.float64)  # exact for both
            ids[place], values[place] = best[..., 0].int(), best[..., 1].float()
        outside = ~mask[:, None]
        return [ids.masked_fill(outside, 0), _possible(values).masked_fill(outside, 0.0)]

    def _ask_all(self, pieces: Sequence[list[int]]) -> list[Told]:
        """The answers about sequences, the longest of which are asked about first. The first error ends it."""
        time_s = SHARE * self._worker.config.timeouts.command_s
        end = time.monotonic() + time_s
        waiting = deque(sorted(range(len(pieces)), key=lambda piece: len(pieces[piece]), reverse=True))
        answers: queue.Queue[tuple[int, Told | Exception, Counter[str]]] = queue.Queue()

        def work() -> None:
            while True:
                try:
                    piece = waiting.popleft()
                except IndexError:
                    return
                counts: Counter[str] = Counter()
                answer: Told | Exception
                try:
                    deadline = min(end, time.monotonic() + self._given.retry_s)
                    answer = self._endpoint.ask(pieces[piece], deadline, counts)
                except Exception as error:
                    answer = error
                answers.put((piece, answer, counts))

        # Daemons, so a rank that ends need not wait for the server.
        for _ in range(min(self._given.max_in_flight, len(pieces))):
            threading.Thread(target=work, daemon=True, name="teacher").start()
        found: dict[int, Told] = {}
        while len(found) < len(pieces):
            try:
                piece, answer, counts = answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                waiting.clear()
                text = f"{len(found)} of {len(pieces)} sequences have an answer after {time_s:g} s"
                remedy = "raise teacher.endpoint.max_in_flight or timeouts.command_s"
                raise EndpointError(f"teacher.endpoint: {self._endpoint.url}: {text}; {remedy}") from None
            self._counts += counts
            if isinstance(answer, Exception):
                waiting.clear()
                raise EndpointError(f"teacher.endpoint: {answer}") from answer
            found[piece] = answer
        return [found[piece] for piece in range(len(pieces))]


def _possible(logprobs: Tensor) -> Tensor:
    """The log-probs, with UNKNOWN where the probability is 0."""
    return logprobs.masked_fill(logprobs <= ZERO_PROBABILITY, UNKNOWN)
