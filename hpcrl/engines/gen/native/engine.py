"""The native generator: continuous batching in plain torch, in the rank's process.

Live requests occupy consecutive slots 0..B-1 of a slot-wise KV cache that is sliced to the longest live length.
Admission writes the keys and values of a request's prompt without the last token, which the next decode iteration feeds
like any other: all sampling happens in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcrl.config import Config
from hpcrl.engines.gen.base import Output, ReplicaRanks, Request
from hpcrl.engines.gen.checks import check_requests
from hpcrl.engines.gen.native.architecture import read_architecture
from hpcrl.engines.gen.native.kv import KVCache, round_up
from hpcrl.engines.gen.native.slots import Slots
from hpcrl.engines.gen.native.spec import NativeConfig
from hpcrl.engines.gen.native.tape import Tape
from hpcrl.engines.gen.native.transformer import Transformer
from hpcrl.engines.gen.native.weights import FusedWeights, read_safetensors
from hpcrl.engines.gen.sampling import SamplingPlan, sample, uniforms
from hpcrl.engines.gen.stops import StopStrings
from hpcrl.engines.routes import RouteShape, routes_of
from hpcrl.rollout.types import FinishReason
from hpcrl.trajectory import Field

PREFILL_TOKENS = 4096  # in one forward
ADMISSION_SHARE = 32  # 1 / share of the slots must be free before requests are admitted, to prefill several at once


def make(config: Config, model_path: Path, tokenizer: Any, replica: ReplicaRanks) -> NativeEngine:
    """The engine of one replica; its weights come from the trainer."""
    return NativeEngine(
        model_path,
        tokenizer=tokenizer,
        max_slots=config.generator.max_slots,
        max_length=config.max_sequence_tokens,
        dtype=getattr(torch, config.generator.dtype),
        float32_head=config.generator.head_dtype == "float32",
        kv_bucket=config.generator.section(NativeConfig).kv_bucket,
        device="cuda" if torch.cuda.is_available() else "cpu",
        deterministic=config.deterministic,
        routes=routes_of(config, model_path),
        load=False,
    )


class NativeEngine:
    """GenEngine for HF folders of the families in families.py. ValueError if the folder or the sizes are invalid.

    tokenizer: needed for stop strings only. max_slots: requests decoded at once. max_length: maximum tokens of prompt
    and response together. float32_head: compute the vocabulary projection in float32. kv_bucket: the KV cache is read
    up to a multiple of this. deterministic: always decode max_slots rows, and start from an empty cache whenever
    nothing is live, so that a request's bits do not depend on other requests. routes: record the chosen experts in the
    column `routes` of outputs. load=False leaves the weights to load_weights().
    """

    def __init__(
        self,
        model_path: Path,
        *,
        tokenizer: Any = None,
        max_slots: int,
        max_length: int,
        dtype: torch.dtype,
        float32_head: bool = False,
        kv_bucket: int = 32,
        device: torch.device | str = "cpu",
        deterministic: bool = False,
        routes: RouteShape | None = None,
        load: bool = True,
    ):
        for name, value in {"max_slots": max_slots, "max_length": max_length, "kv_bucket": kv_bucket}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, at least 1 is needed")
        self._arch = read_architecture(Path(model_path))
        if max_length > self._arch.max_positions:
            raise ValueError(
                f"max_length {max_length} exceeds the {self._arch.max_positions} positions of the model in {model_path}"
            )
        self.version = -1
        self.max_slots = max_slots
        self._max_length, self._bucket, self._deterministic = max_length, kv_bucket, deterministic
        self._dtype, self._device, self._float32_head = dtype, torch.device(device), float32_head
        self._stops = StopStrings(tokenizer, self._arch.vocab_size) if tokenizer is not None else None
        self._waiting: dict[int, Request] = {}
        self._routes = routes.field if routes is not None else None
        self._slots, self._tape = Slots(max_slots), Tape(max_slots, self._routes)
        self._cache = KVCache(self._arch, max_slots, kv_bucket, dtype, self._device)
        self._weights: FusedWeights | None = None
        self._model: Transformer | None = None
        self._plan: SamplingPlan | None = None  # None: the slots have changed
        self._stop_groups: list[tuple[tuple[str, ...], np.ndarray]] = []
        if load:
            self.load_weights(read_safetensors(Path(model_path)), version=0)

    def add(self, requests: Sequence[Request]) -> None:
        """See GenEngine."""
        check_requests(
            requests,
            self._waiting.keys() | self._slots.slot_of.keys(),
            max_length=self._max_length,
            vocab_size=self._arch.vocab_size,
            has_tokenizer=self._stops is not None,
        )
        self._waiting.update((request.id, request) for request in requests)

    @torch.inference_mode()
    def abort(self, ids: Sequence[int]) -> list[Output]:
        """See GenEngine."""
        outputs: dict[int, Output] = {}
        for request_id in dict.fromkeys(ids):
            if request_id in self._slots.slot_of:
                outputs[request_id] = self._output(self._slots.slot_of[request_id], FinishReason.ABORT)
            elif request_id in self._waiting:
                outputs[request_id] = _empty_output(self._waiting.pop(request_id), self._routes)
        self._vacate([self._slots.slot_of[i] for i in outputs if i in self._slots.slot_of])
        return list(outputs.values())

    @torch.inference_mode()
    def step(self, num_tokens: int) -> list[Output]:
        """See GenEngine. ValueError if the weights are not loaded."""
        if self.version < 0 and (self._slots.num_live or self._waiting):
            raise ValueError("the generator has no weights: call load_weights() before step()")
        finished: list[Output] = []
        for _ in range(num_tokens):
            self._admit()
            if not self._slots.num_live:
                break
            finished += self._iterate()
        self._tape.forget(min((track.start for track in self._slots.tracks), default=self._tape.end))
        return finished

    def progress(self) -> dict[int, int]:
        """See GenEngine."""
        running = zip(self._slots.requests, self._slots.tracks, strict=True)
        return {request.id: self._tape.end - track.start for request, track in running} | dict.fromkeys(
            self._waiting, 0
        )

    @torch.inference_mode()
    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See GenEngine. A collection is checked before anything is changed. An iterator is consumed tensor by tensor;
        the engine has no weights (version -1) if that fails."""
        if version < 0:
            raise ValueError(f"weights version is {version}, 0 or more is needed")
        weights = self._weights or FusedWeights(self._arch, self._dtype, self._device, self._float32_head)
        weights.check(named)
        self.version = -1
        weights.load(named)
        if self._model is None:
            self._weights = weights
            self._model = Transformer(self._arch, weights, self._arch.rotations(self._max_length, self._device))
        self.version = version

    def share_weights(self) -> dict[str, torch.Tensor]:
        """See SharesWeights."""
        assert self._weights is None, "share_weights() comes before the first load_weights()"
        self._weights = FusedWeights(self._arch, self._dtype, self._device, self._float32_head, shared=True)
        return self._weights.parameters()

    @torch.inference_mode()
    def recompute(self) -> None:
        """See GenEngine. ValueError if the weights are not loaded."""
        if self.version < 0 and self._slots.num_live:
            raise ValueError("the generator has no weights: call load_weights() before recompute()")
        prefixes: dict[bytes, tuple[np.ndarray, list[int]]] = {}
        for slot, (request, track) in enumerate(zip(self._slots.requests, self._slots.tracks, strict=True)):
            tokens = np.concatenate((request.prompt_ids, self._tape.read(track, "token_ids")))
            _share(prefixes, tokens[:-1], slot)
        self._prefill_all(prefixes)

    def sleep(self) -> None:
        """See GenEngine. ValueError while requests are running."""
        if self._slots.num_live:
            raise ValueError(f"cannot sleep while {self._slots.num_live} requests are running: abort or finish them")
        self._cache.clear()
        self._model, self.version = None, -1
        if self._weights is not None and not self._weights.shared:
            self._weights = None

    def wake(self) -> None:
        """See GenEngine. Memory is allocated when needed."""

    def close(self) -> None:
        """See GenEngine. Drops every request."""
        self.abort(list(self.progress()))
        self.sleep()

    def _admit(self) -> None:
        """Move waiting requests into free slots, first come, first served, and prefill their prompts."""
        free = self.max_slots - self._slots.num_live
        if not self._waiting or free < min(len(self._waiting), max(1, self.max_slots // ADMISSION_SHARE)):
            return
        if self._deterministic and not self._slots.num_live:
            self._cache.clear()
        prefixes: dict[bytes, tuple[np.ndarray, list[int]]] = {}
        for request_id in list(self._waiting)[:free]:
            request = self._waiting.pop(request_id)
            eos = () if request.params.ignore_eos else self._arch.eos_ids
            slot = self._slots.add(request, (*eos, *request.params.stop_token_ids), self._tape.end)
            _share(prefixes, request.prompt_ids[:-1], slot)
        self._plan = None
        self._prefill_all(prefixes)

    def _prefill_all(self, prefixes: Mapping[bytes, tuple[np.ndarray, list[int]]]) -> None:
        """Prefill each prefix once into all its slots, a limited number of tokens at a time."""
        # The longest first: neighbours of similar length waste little padding.
        queue = sorted((group for group in prefixes.values() if len(group[0])), key=lambda group: -len(group[0]))
        while queue:
            count = max(1, PREFILL_TOKENS // len(queue[0][0]))
            self._prefill(queue[:count])
            queue = queue[count:]

    def _prefill(self, groups: list[tuple[np.ndarray, list[int]]]) -> None:
        """Prefill prefixes, the longest first, each into all slots that share it."""
        assert self._model is not None
        longest = len(groups[0][0])
        ids = np.zeros((len(groups), longest), dtype=np.int64)
        for row, (prefix, _) in zip(ids, groups, strict=True):
            row[: len(prefix)] = prefix
        slots = [slot for _, sharing in groups for slot in sharing]
        source = np.repeat(np.arange(len(groups)), [len(sharing) for _, sharing in groups])
        self._cache.reserve(longest)
        self._model.prefill(
            self._tensor(ids), self._cache, torch.tensor(slots, device=self._device), self._tensor(source)
        )

    def _iterate(self) -> list[Output]:
        """One decode iteration: every live request gets a token. Returns those that finished, in order of slot."""
        assert self._model is not None
        slots, iteration = self._slots, self._tape.end
        live = slots.num_live
        rows = self.max_slots if self._deterministic else live
        plan = self._plan or self._replan(rows)
        length = round_up(int(slots.positions[:live].max()) + 1, self._bucket)
        self._cache.reserve(length)
        # Old values of free slots must not point past the read range.
        slots.positions[live:rows] = 0
        self._model.routes = None if self._routes is None else []
        logits = self._model.decode(
            self._tensor(slots.tokens[:rows]), self._tensor(slots.positions[:rows]), self._cache, length
        )
        routes, self._model.routes = self._model.routes, None
        uniform = self._tensor(uniforms(slots.origins[:rows], iteration))
        ids, logprobs, behaviour = (t.cpu().numpy() for t in sample(logits, plan, uniform))
        if not np.isfinite(logprobs[:live]).all():
            bad = slots.requests[int(np.argmin(np.isfinite(logprobs[:live])))].id
            raise FloatingPointError(f"request {bad}: the logits are not finite under weights version {self.version}")
        self._tape.write(self.version, ids, logprobs, behaviour, *self._recorded(routes))
        slots.tokens[:rows] = ids
        slots.positions[:live] += 1
        return self._collect(ids[:live], iteration)

    def _recorded(self, routes: list[torch.Tensor] | None) -> list[np.ndarray]:
        """The choices of all layers as a column of the tape, if they are recorded."""
        if routes is None or self._routes is None:
            return []
        chosen = torch.cat(routes, dim=1).to(getattr(torch, self._routes.travels_as))
        return [chosen.cpu().numpy().reshape(self._routes.shape(len(chosen)))]

    def _collect(self, ids: np.ndarray, iteration: int) -> list[Output]:
        """The outputs of the requests that end with these tokens (int64 [live]); their slots are free afterwards."""
        stopped = (ids[:, None] == self._slots.stop_ids[: len(ids)]).any(axis=1)
        for stop, members in self._stop_groups:
            assert self._stops is not None  # add() refuses stop strings without a tokenizer
            for slot in members[self._stops.closers(stop)[ids[members]]]:
                tail = self._tape.read(self._slots.tracks[slot], "token_ids", last=self._stops.window(stop))
                stopped[slot] |= self._stops.completes(stop, tail.tolist())
        done = np.flatnonzero(stopped | (self._slots.last_iteration[: len(ids)] == iteration)).tolist()
        outputs = [self._output(slot, FinishReason.STOP if stopped[slot] else FinishReason.LENGTH) for slot in done]
        self._vacate(done)
        return outputs

    def _output(self, slot: int, reason: FinishReason) -> Output:
        request, track = self._slots.requests[slot], self._slots.tracks[slot]
        return Output(
            id=request.id,
            token_ids=self._tape.read(track, "token_ids"),
            gen_logprobs=self._tape.read(track, "gen_logprobs"),
            versions=self._tape.versions(track),
            finish_reason=reason,
            gen_logprobs_behaviour=(
                self._tape.read(track, "gen_logprobs_behaviour") if request.params.truncates else None
            ),
            columns={} if self._routes is None else {"routes": self._tape.read(track, "routes")},
        )

    def _vacate(self, done: list[int]) -> None:
        """Free these slots; the last live requests and their KV move into the gaps."""
        if not done:
            return
        sources, targets = self._slots.remove(done, self._tape.end)
        if targets:
            self._cache.move(sources, targets, int(self._slots.positions[targets].max()))
        self._plan = None

    def _replan(self, rows: int) -> SamplingPlan:
        """Compute values that are constant until a slot gets another request."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for slot, request in enumerate(self._slots.requests):
            if request.params.stop:
                groups.setdefault(request.params.stop, []).append(slot)
        self._stop_groups = [(stop, np.array(members)) for stop, members in groups.items()]
        self._plan = self._slots.plan(rows, self._arch.vocab_size, self._device)
        return self._plan

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _share(prefixes: dict[bytes, tuple[np.ndarray, list[int]]], tokens: Sequence[int] | np.ndarray, slot: int) -> None:
    prefix = np.asarray(tokens, dtype=np.int64)
    prefixes.setdefault(prefix.tobytes(), (prefix, []))[1].append(slot)


def _empty_output(request: Request, routes: Field | None) -> Output:
    """Output of a request that was aborted before its first token."""
    none = np.empty(0, dtype=np.float32)
    return Output(
        id=request.id,
        token_ids=np.empty(0, dtype=np.int32),
        gen_logprobs=none,
        versions=np.empty(0, dtype=np.int32),
        finish_reason=FinishReason.ABORT,
        gen_logprobs_behaviour=none if request.params.truncates else None,
        columns={} if routes is None else {"routes": np.empty(routes.shape(0), dtype=routes.travels_as)},
    )
