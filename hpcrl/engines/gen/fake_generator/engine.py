"""A generator without a model, for tests and debug=fake. Lengths and durations are configured; tokens depend on the
seed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from hpcrl.config import Config
from hpcrl.engines.gen.checks import check_requests
from hpcrl.engines.gen.fake_generator.spec import SPEC
from hpcrl.engines.gen.generation_engine import Output, ReplicaRanks, Request
from hpcrl.engines.gen.sampling import GOLDEN, stream_origin, uniforms
from hpcrl.rollout.types import FinishReason


@dataclass(slots=True)
class _RunningRequest:
    """A waiting or running request. All its tokens are known from the start."""

    request: Request
    token_ids: np.ndarray
    reason: FinishReason
    versions: list[int] = field(default_factory=list)


def seeded_length(request: Request) -> int:
    """A length from 1 to max_new_tokens, derived from the request's seed."""
    return 1 + request.seed % request.params.max_new_tokens


def long_tailed(median: int | None, tail: float) -> Callable[[Request], int]:
    """Lognormal lengths up to max_new_tokens, derived from the request's seed.

    Args:
        median: Median of the lengths; None means an eighth of max_new_tokens.
        tail: Standard deviation of the lengths' logarithm.
    """

    def length(request: Request) -> int:
        longest = request.params.max_new_tokens
        uniform = float(uniforms(np.array([stream_origin(request.seed, 1)]), 0)[0])
        scale = math.exp(tail * NormalDist().inv_cdf(min(max(uniform, 1e-6), 1 - 1e-6)))
        return max(1, min(longest, round((median or longest / 8) * scale)))

    return length


def make(config: Config, model_path: Path, tokenizer: Any, replica: ReplicaRanks) -> FakeEngine:
    """The engine of debug=fake."""
    fake = config.fake
    return FakeEngine(
        max_num_seqs=config.generator.max_num_seqs,
        max_length=config.max_sequence_tokens,
        vocab_size=len(tokenizer),
        lengths=long_tailed(fake.median_tokens, fake.tail),
        decode_s=fake.decode_s,
        prefill_s=fake.prefill_s,
        load_s=fake.publish_s,
        stops=False,
    )


class FakeEngine:
    """GenEngine whose n-th token of a request depends only on (seed, n), uniform over the vocabulary. `weights` holds
    the last loaded tensors.

    Args:
        lengths: Returns a request's response length. A response shorter than max_new_tokens ends with STOP.
        eos_id: Ends a response unless ignore_eos is set, in addition to the request's stop ids.
        stops: Whether stop tokens end a response. Stop strings are always ignored.
        shapes: Names and shapes that load_weights() accepts; None accepts all.
        decode_s: step() sleeps this long per decode iteration.
        prefill_s: step() sleeps this long per request that gets a slot.
        load_s: load_weights() sleeps this long.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_length: int,
        vocab_size: int = 320,
        eos_id: int | None = None,
        lengths: Callable[[Request], int] = seeded_length,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        decode_s: float = 0.0,
        prefill_s: float = 0.0,
        load_s: float = 0.0,
        stops: bool = True,
    ):
        self.version = -1
        self.max_num_seqs = max_num_seqs
        self.weights: dict[str, torch.Tensor] = {}
        self._max_length, self._vocab_size, self._eos_id = max_length, vocab_size, eos_id
        self._lengths, self._shapes = lengths, shapes
        self._decode_s, self._prefill_s, self._load_s = decode_s, prefill_s, load_s
        self._stops = stops
        self._live: dict[int, _RunningRequest] = {}
        self._waiting: dict[int, _RunningRequest] = {}

    def add(self, requests: Sequence[Request]) -> None:
        check_requests(
            requests,
            self._live.keys() | self._waiting.keys(),
            max_length=self._max_length,
            vocab_size=self._vocab_size,
            has_tokenizer=True,
            media=SPEC.media,
        )
        self._waiting.update((request.id, self._foresee(request)) for request in requests)

    def abort(self, ids: Sequence[int]) -> list[Output]:
        found = (self._live.pop(i, None) or self._waiting.pop(i, None) for i in ids)
        return [self._output(growing, FinishReason.ABORT) for growing in found if growing is not None]

    def step(self, num_tokens: int) -> list[Output]:
        if self.version < 0 and (self._live or self._waiting):
            raise ValueError("the generator has no weights: call load_weights() before step()")
        finished, seconds = [], 0.0
        for _ in range(num_tokens):
            for request_id in list(self._waiting)[: self.max_num_seqs - len(self._live)]:
                self._live[request_id] = self._waiting.pop(request_id)
                seconds += self._prefill_s
            seconds += self._decode_s * bool(self._live)
            for request_id, growing in list(self._live.items()):
                growing.versions.append(self.version)
                if len(growing.versions) == len(growing.token_ids):
                    finished.append(self._output(self._live.pop(request_id), growing.reason))
        if seconds:  # sleep(0) would still yield to other threads
            time.sleep(seconds)
        return finished

    def progress(self) -> dict[int, int]:
        return {i: len(growing.versions) for i, growing in (self._live | self._waiting).items()}

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if version < 0:
            raise ValueError(f"weights version is {version}, 0 or more is needed")
        if not isinstance(named, Collection):
            self.version = -1  # as in the native engine, there are no weights after an iterator has failed
        weights = {name: tensor.detach().clone() for name, tensor in named}
        if self._shapes is not None:
            for name, tensor in weights.items():
                if (shape := self._shapes.get(name)) != tuple(tensor.shape):
                    raise ValueError(f"weight {name!r} has shape {list(tensor.shape)}, the model has {shape}")
            if missing := sorted(self._shapes.keys() - weights.keys()):
                raise ValueError(f"{len(missing)} weights are missing, e.g. {missing[:3]}")
        time.sleep(self._load_s)
        self.weights, self.version = weights, version

    def recompute(self) -> None:
        """Does nothing, since there is no cache."""

    def sleep(self) -> None:
        if self._live:
            raise ValueError(f"cannot sleep while {len(self._live)} requests are running: abort or finish them")
        self.weights, self.version = {}, -1

    def wake(self) -> None:
        """Nothing to undo before the weights are loaded again."""

    def close(self) -> None:
        self.abort(list(self.progress()))
        self.sleep()

    def _foresee(self, request: Request) -> _RunningRequest:
        """Compute all tokens of a request, and its finish reason."""
        params = request.params
        length = min(self._lengths(request), params.max_new_tokens)
        origins = np.array([stream_origin(request.seed, 0)]) + np.arange(length, dtype=np.uint64) * GOLDEN
        token_ids = (uniforms(origins, 0) * self._vocab_size).astype(np.int32)
        stops = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, self._eos_id)
        hits = np.flatnonzero(np.isin(token_ids, [stop for stop in stops if stop is not None and self._stops]))
        if len(hits):
            return _RunningRequest(request, token_ids[: hits[0] + 1], FinishReason.STOP)
        reason = FinishReason.STOP if length < params.max_new_tokens else FinishReason.LENGTH
        return _RunningRequest(request, token_ids, reason)

    def _output(self, growing: _RunningRequest, reason: FinishReason) -> Output:
        count = len(growing.versions)
        logprobs = np.full(count, -math.log(self._vocab_size), dtype=np.float32)
        return Output(
            id=growing.request.id,
            token_ids=growing.token_ids[:count].copy(),
            gen_logprobs=logprobs,
            versions=np.array(growing.versions, dtype=np.int32),
            finish_reason=reason,
            gen_logprobs_behaviour=logprobs.copy() if growing.request.params.truncates else None,
        )
