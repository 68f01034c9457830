"""A generator without a model: set response lengths, tokens from the seed alone; for tests of what drives engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hpcrl.engines.gen.base import Output, Request
from hpcrl.engines.gen.checks import check_requests
from hpcrl.engines.gen.sampling import stream_origin, uniforms
from hpcrl.rollout.types import FinishReason


@dataclass(slots=True)
class _Growing:
    request: Request
    length: int
    token_ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


def seeded_length(request: Request) -> int:
    """A length between 1 and max_new_tokens, a function of the request's seed."""
    return 1 + request.seed % request.params.max_new_tokens


class FakeEngine:
    """GenEngine whose n-th token of a request is a function of (seed, n), uniform over the vocabulary.

    lengths: the response length of a request; one below max_new_tokens ends with STOP. Stop ids and, unless
    ignore_eos, `eos_id` stop too. shapes: what load_weights accepts, everything if None. The last loaded tensors are
    in `weights`.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        max_length: int,
        vocab_size: int = 320,
        eos_id: int | None = None,
        lengths: Callable[[Request], int] = seeded_length,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ):
        self.version = -1
        self.max_slots = max_slots
        self.weights: dict[str, torch.Tensor] = {}
        self._max_length, self._vocab_size, self._eos_id = max_length, vocab_size, eos_id
        self._lengths, self._shapes = lengths, shapes
        self._live: dict[int, _Growing] = {}
        self._waiting: dict[int, _Growing] = {}

    def add(self, requests: Sequence[Request]) -> None:
        check_requests(
            requests,
            self._live.keys() | self._waiting.keys(),
            max_length=self._max_length,
            vocab_size=self._vocab_size,
            has_tokenizer=False,
        )
        self._waiting.update((r.id, _Growing(r, min(self._lengths(r), r.params.max_new_tokens))) for r in requests)

    def abort(self, ids: Sequence[int]) -> list[Output]:
        found = (self._live.pop(i, None) or self._waiting.pop(i, None) for i in ids)
        return [self._output(growing, FinishReason.ABORT) for growing in found if growing is not None]

    def step(self, num_tokens: int) -> list[Output]:
        if self.version < 0 and (self._live or self._waiting):
            raise ValueError("the generator has no weights: call load_weights() before step()")
        finished = []
        for _ in range(num_tokens):
            for request_id in list(self._waiting)[: self.max_slots - len(self._live)]:
                self._live[request_id] = self._waiting.pop(request_id)
            for request_id, growing in list(self._live.items()):
                if (reason := self._grow(growing)) is not None:
                    finished.append(self._output(self._live.pop(request_id), reason))
        return finished

    def progress(self) -> dict[int, int]:
        return {i: len(growing.token_ids) for i, growing in (self._live | self._waiting).items()}

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if version < 0:
            raise ValueError(f"weights version is {version}, 0 or more is needed")
        if not isinstance(named, Collection):
            self.version = -1  # as in the native engine: an iterator that fails leaves no weights
        weights = {name: tensor.detach().clone() for name, tensor in named}
        if self._shapes is not None:
            for name, tensor in weights.items():
                if (shape := self._shapes.get(name)) != tuple(tensor.shape):
                    raise ValueError(f"weight {name!r} has shape {list(tensor.shape)}, the model has {shape}")
            if missing := sorted(self._shapes.keys() - weights.keys()):
                raise ValueError(f"{len(missing)} weights are missing, e.g. {missing[:3]}")
        self.weights, self.version = weights, version

    def recompute(self) -> None:
        """There is no cache."""

    def sleep(self) -> None:
        if self._live:
            raise ValueError(f"cannot sleep while {len(self._live)} requests are running: abort or finish them")
        self.weights, self.version = {}, -1

    def wake(self) -> None:
        """Nothing to undo before the weights are loaded again."""

    def close(self) -> None:
        self.abort(list(self.progress()))
        self.sleep()

    def _grow(self, growing: _Growing) -> FinishReason | None:
        """Add a token; why the request is over, or None."""
        request, index = growing.request, len(growing.token_ids)
        uniform = uniforms(np.array([stream_origin(request.seed, 0)]), index)[0]
        token = int(uniform * self._vocab_size)
        growing.token_ids.append(token)
        growing.versions.append(self.version)
        stops = (
            request.params.stop_token_ids
            if request.params.ignore_eos
            else (*request.params.stop_token_ids, self._eos_id)
        )
        if token in stops:
            return FinishReason.STOP
        if index + 1 == growing.length:
            return FinishReason.STOP if growing.length < request.params.max_new_tokens else FinishReason.LENGTH
        return None

    def _output(self, growing: _Growing, reason: FinishReason) -> Output:
        logprobs = np.full(len(growing.token_ids), -math.log(self._vocab_size), dtype=np.float32)
        return Output(
            id=growing.request.id,
            token_ids=np.array(growing.token_ids, dtype=np.int32),
            gen_logprobs=logprobs,
            versions=np.array(growing.versions, dtype=np.int32),
            finish_reason=reason,
            gen_logprobs_behaviour=logprobs.copy() if growing.request.params.truncates else None,
        )
