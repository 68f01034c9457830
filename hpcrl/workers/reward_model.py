"""The reward model role: a frozen model with a scalar head, or several, on a rank of the run, which scores dialogues.

Requests that arrive during a forward pass are batched into the next one, oldest first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from hpcrl.data.dialogue_tokens import dialogue_tokens
from hpcrl.engines.scalar import ScalarModel
from hpcrl.metrics.stats import Stats
from hpcrl.workers.load import Load
from hpcrl.workers.role import Rank
from hpcrl.workers.serving import Question, Service

PATH = "/score"


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A dialogue as chat messages, ending with a model turn."""

    messages: list[dict[str, Any]]


class RewardModelRole:
    """A replica of the reward model on one rank."""

    def __init__(self, worker: Rank):
        from transformers import AutoTokenizer

        config, world = worker.config.reward_model, worker.world
        assert config.path is not None, "checked before the start"
        path = Path(config.path)
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._most_tokens = config.max_tokens
        self.model = ScalarModel(
            path,
            dtype=getattr(torch, config.dtype),
            device="cuda" if torch.cuda.is_available() else "cpu",
            max_batch_tokens=config.max_tokens_per_batch,
            alone=worker.config.deterministic,
            weights=config.head_weights,
        )
        self._most_in_pass = config.max_tokens_per_batch
        self._waiting: deque[tuple[Question, list[int]]] = deque()
        self._load = Load("reward_model", config.max_requests)
        most = config.max_requests
        self._service = Service(world.address, world.token, {PATH: ScoreRequest}, most, world.mailbox_server.wakeup.set)
        self.url = self._service.url

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {}

    def poll(self) -> bool:
        for question in self._service.take():
            try:
                self._waiting.append((question, self._tokens(question.asked)))
            except Exception as error:  # from a template, which runs code of the model's folder
                question.refuse(f"{type(error).__name__}: {error}")
        self._load.note(len(self._waiting))
        batch = self._next()
        values = self.model.values([ids for _, ids in batch])
        scores = [self.model.score(own) if all(map(math.isfinite, own)) else math.nan for own in values]
        for (question, _), own, score in zip(batch, values, scores, strict=True):
            if math.isfinite(score):
                heads = dict(zip(self.model.labels, own, strict=True)) if len(own) > 1 else {}
                question.answer({"score": score, "heads": heads})
            else:
                question.refuse(f"the score is {score}")
        self._load.answered(sum(map(math.isfinite, scores)))
        self._load.note(len(self._waiting))
        return bool(batch)

    def _next(self) -> list[tuple[Question, list[int]]]:
        """The oldest requests that fit into one forward pass, except requests of disconnected clients."""
        batch: list[tuple[Question, list[int]]] = []
        width = 0
        while self._waiting:
            question, ids = self._waiting[0]
            width = max(width, len(ids))
            if batch and (len(batch) + 1) * width > self._most_in_pass:
                break
            self._waiting.popleft()
            if not question.gone:
                batch.append((question, ids))
        return batch

    def answer(self, question: str, values: dict[str, Any]) -> Stats:
        """The load since the last call (see Answers)."""
        return self._load.take(self._service.take_refused())

    def close(self) -> None:
        self._service.close()

    def _tokens(self, asked: ScoreRequest) -> list[int]:
        """The token ids of a dialogue, rendered with the chat template. ValueError if there are none, too many, or ids
        outside the vocabulary."""
        ids = dialogue_tokens(self._tokenizer, asked.messages)
        if not 0 < len(ids) <= self._most_tokens:
            raise ValueError(f"the dialogue has {len(ids)} tokens, reward_model.max_tokens={self._most_tokens}")
        if max(ids) >= self.model.vocab_size:
            raise ValueError(f"token {max(ids)} is outside the vocabulary of {self.model.vocab_size}")
        return ids
