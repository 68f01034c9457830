"""The native generator: continuous batching in plain torch, in the rank's process.

Live requests occupy consecutive slots. Their keys and values are in blocks (blocks.py), which requests with a common
prefix share; states of recurrent layers are stored by slot (recurrent.py). Admission prefills all of a request's tokens
but the last. The next decode iteration feeds the last token like any other, so all sampling happens in one place.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcrl.config import Config, LoRAConfig
from hpcrl.engines.expert_routes import RouteShape, routes_of
from hpcrl.engines.gen.checks import check_requests
from hpcrl.engines.gen.generation_engine import NOTHING_KEPT, Output, ReplicaRanks, Request
from hpcrl.engines.gen.native.allocation import AllocationFailure, PrefillBatch, RequestBlocks
from hpcrl.engines.gen.native.architecture import read_architecture
from hpcrl.engines.gen.native.blocks import Blocks
from hpcrl.engines.gen.native.given_tokens import GivenTokens, logprobs_of
from hpcrl.engines.gen.native.images import Images, make_tower
from hpcrl.engines.gen.native.kv import NO_INDEX, KVCache, block_bytes
from hpcrl.engines.gen.native.output_buffer import OutputBuffer
from hpcrl.engines.gen.native.paged_attention import DecodeAttention, PrefillAttention
from hpcrl.engines.gen.native.recurrent import PrefillRows, RecurrentStates
from hpcrl.engines.gen.native.slots import Slots, WaitingRequest
from hpcrl.engines.gen.native.spec import NativeConfig
from hpcrl.engines.gen.native.transformer import Transformer
from hpcrl.engines.gen.native.weights import FusedWeights
from hpcrl.engines.gen.sampling import SamplingPlan, sample, uniforms
from hpcrl.engines.gen.stops import StopStrings
from hpcrl.engines.hf_folder import read_safetensors
from hpcrl.rollout.device_copies import to_device, to_host
from hpcrl.rollout.types import FinishReason
from hpcrl.spec.media import IMAGE

PREFILL_TOKENS = 4096  # maximum tokens computed in one forward pass, padding included
PREFILL_READS = 16384  # maximum tokens that the rows of one forward pass attend to, cached tokens included
ADMISSION_SHARE = 32  # requests are admitted once 1 / 32 of the slots is free, to prefill several at once
LOOKAHEAD = 8  # number of tokens for which blocks are allocated at once, so cache reads are planned less often
ALL_VERSIONS = sys.maxsize


def make(config: Config, model_path: Path, tokenizer: Any, replica: ReplicaRanks) -> NativeEngine:
    """The engine of a replica, without weights, which the trainer sends."""
    section, rollout = config.generator.section(NativeConfig), config.rollout
    return NativeEngine(
        model_path,
        tokenizer=tokenizer,
        max_num_seqs=config.generator.max_num_seqs,
        max_length=config.max_sequence_tokens,
        dtype=getattr(torch, config.generator.dtype),
        float32_head=config.generator.head_dtype == "float32",
        block_tokens=section.block_tokens,
        kv_cache_bytes=section.kv_cache_bytes,
        prefix_staleness=ceil(rollout.max_staleness) if rollout.on_new_weights == "continue" else 0,
        device="cuda" if torch.cuda.is_available() else "cpu",
        deterministic=config.deterministic,
        routes=routes_of(config, model_path),
        lora=config.published_lora,
        load=False,
    )


class _Added(NamedTuple):
    """A slot's new request: its blocks, and its tokens that are not in the cache, from position `start` on."""

    slot: int
    place: RequestBlocks
    tokens: np.ndarray

    @property
    def start(self) -> int:
        return self.place.num_cached


class NativeEngine:
    """GenEngine for HF folders of the families in hpcrl.models.families.NATIVE. ValueError if the folder or the sizes
    are invalid.

    Args:
        tokenizer: Only needed for stop strings.
        max_num_seqs: Maximum number of requests decoded at once.
        max_length: Maximum number of tokens in prompt and response together.
        float32_head: Compute the vocabulary projection in float32.
        block_tokens: Number of tokens in a block of the KV cache.
        kv_cache_bytes: Maximum memory of the KV cache with the states of recurrent layers, by default enough for
            max_num_seqs requests of full length. When it is full, requests wait, or are preempted and later prefilled
            again.
        prefix_staleness: Later requests use a cached prefix if the weights are at most this many versions newer.
        deterministic: Always decode max_num_seqs rows, reserve a request's full length at admission, and share no
            blocks, only the prefill of requests that are admitted together. So a request's bits depend only on them.
        routes: Record the chosen experts in the column `routes` of outputs.
        lora: load_weights() gets adapters, and its first call reads all other weights from the folder.
        load: Read the weights from the folder now. False leaves them to load_weights().
    """

    def __init__(
        self,
        model_path: Path,
        *,
        tokenizer: Any = None,
        max_num_seqs: int,
        max_length: int,
        dtype: torch.dtype,
        float32_head: bool = False,
        block_tokens: int = 32,
        kv_cache_bytes: int | None = None,
        prefix_staleness: int = 0,
        device: torch.device | str = "cpu",
        deterministic: bool = False,
        routes: RouteShape | None = None,
        lora: LoRAConfig | None = None,
        load: bool = True,
    ):
        for name, value in {
            "max_num_seqs": max_num_seqs,
            "max_length": max_length,
            "block_tokens": block_tokens,
        }.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, at least 1 is needed")
        self._model_path, self._lora = Path(model_path), lora
        self._arch = read_architecture(self._model_path)
        if max_length > self._arch.max_positions:
            raise ValueError(
                f"max_length {max_length} exceeds the {self._arch.max_positions} positions of the model in {model_path}"
            )
        self.version = -1
        self.max_num_seqs = max_num_seqs
        self._max_length, self._deterministic, self._prefix_staleness = max_length, deterministic, prefix_staleness
        self._dtype, self._device, self._float32_head = dtype, torch.device(device), float32_head
        self._stops = StopStrings(tokenizer, self._arch.vocab_size) if tokenizer is not None else None
        longest = ceil(max_length / block_tokens)
        num_blocks = max_num_seqs * longest
        recurrent, states = self._arch.delta, 0
        if recurrent is not None:
            states = 2 * max_num_seqs * sum(self._arch.recurrent) * recurrent.state_bytes(dtype)
        if kv_cache_bytes is not None:
            num_blocks = min(num_blocks, (kv_cache_bytes - states) // block_bytes(self._arch, block_tokens, dtype))
        if num_blocks < longest:
            least = longest * block_bytes(self._arch, block_tokens, dtype) + states
            raise ValueError(
                f"kv_cache_bytes is {kv_cache_bytes}, but one request of max_length {max_length} needs {least}"
            )
        self._waiting: dict[int, WaitingRequest] = {}
        self._routes = routes.field if routes is not None else None
        self._slots, self._output_buffer = Slots(max_num_seqs, longest), OutputBuffer(max_num_seqs, self._routes)
        self._blocks = Blocks(num_blocks, block_tokens, max_num_seqs if recurrent is not None else None)
        self._states: RecurrentStates | None = None
        if recurrent is not None:
            count = sum(self._arch.recurrent)
            self._states = RecurrentStates(recurrent, count, max_num_seqs, dtype, self._device)
        self._cache = KVCache(self._arch, num_blocks, block_tokens, dtype, self._device)
        self._blocks_needed = 0  # number of blocks that must be available before the next admission
        self._weights: FusedWeights | None = None
        self._images: Images | None = None
        self._model: Transformer | None = None
        self._plan: SamplingPlan | None = None  # None after the slots have changed
        self._decoding: DecodeAttention | None = None  # None after the slots' blocks have changed
        self._planned_until = 0  # the iteration before which `_decoding` must be planned again
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
            media=() if self._arch.vision is None else (IMAGE,),
            vision=self._arch.vision,
        )
        self._waiting.update((request.id, WaitingRequest(request, self._output_buffer.nothing)) for request in requests)

    @torch.inference_mode()
    def abort(self, ids: Sequence[int]) -> list[Output]:
        """See GenEngine."""
        outputs: dict[int, Output] = {}
        for request_id in dict.fromkeys(ids):
            if request_id in self._slots.slot_of:
                outputs[request_id] = self._output(self._slots.slot_of[request_id], FinishReason.ABORT)
            elif request_id in self._waiting:
                queued = self._waiting.pop(request_id)
                outputs[request_id] = _output(queued.request, queued.output_so_far, FinishReason.ABORT)
                self._blocks_needed = 0  # the next waiting request may need fewer
        self._free_slots([self._slots.slot_of[i] for i in outputs if i in self._slots.slot_of])
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
        self._output_buffer.forget(min((span.start for span in self._slots.spans), default=self._output_buffer.end))
        return finished

    @torch.inference_mode()
    def logprobs(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[GivenTokens]:
        """Of rows (prompt, response), the log-probs of the responses' tokens at temperature 1. ValueError for a row
        with an empty part or too long, without weights, and while requests are running, whose states it would
        overwrite."""
        if self._model is None or self._slots.num_live:
            raise ValueError("log-probs of given tokens need weights, and no running requests")
        for number, (prompt, response) in enumerate(rows):
            if not len(prompt) or not len(response) or len(prompt) + len(response) > self._max_length + 1:
                raise ValueError(
                    f"row {number} has {len(prompt)} tokens of prompt and {len(response)} of response; at least 1 of "
                    f"each and at most {self._max_length + 1} together are needed (max_length {self._max_length})"
                )
        return logprobs_of(rows, self._model, self._arch, self._states, self.max_num_seqs, self._device)

    def progress(self) -> dict[int, int]:
        """See GenEngine."""
        running = zip(self._slots.requests, self._slots.spans, strict=True)
        waiting = {i: len(queued.output_so_far["token_ids"]) for i, queued in self._waiting.items()}
        return {request.id: self._output_buffer.length(span) for request, span in running} | waiting

    @torch.inference_mode()
    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int, kept: Collection[str] = ()) -> None:
        """See KeepsWeights. A collection is checked before anything is changed. An iterator is consumed tensor by
        tensor. If it fails, the engine has no weights (version -1)."""
        if version < 0:
            raise ValueError(f"weights version is {version}, 0 or more is needed")
        if kept and self._weights is None:
            raise ValueError(NOTHING_KEPT)
        weights = self._weights or self._new_weights()
        weights.check(named, kept)
        self.version = -1
        weights.load(named, kept)
        if self._model is None:
            self._weights = weights
            if self._arch.vision is not None:
                assert weights.tower is not None
                self._images = Images(self._arch.vision, weights.tower, self._device)
            rotations = self._arch.rotations(self._max_length, self._device)
            self._model = Transformer(self._arch, weights, rotations, self._states, self._deterministic)
        if self._images is not None and weights.has_new_tower(kept):
            self._images.forget()
        self.version = version
        self._blocks.evict_before(version - self._prefix_staleness if self._prefix_staleness else ALL_VERSIONS)
        self._compact(trim=True)

    def share_weights(self) -> dict[str, torch.Tensor]:
        """See SharesWeights."""
        assert self._weights is None, "call share_weights() before the first load_weights()"
        self._weights = self._new_weights(shared=True)
        return self._weights.parameters()

    def _new_weights(self, shared: bool = False) -> FusedWeights:
        base = read_safetensors(self._model_path) if self._lora is not None else ()
        tower = make_tower(self._model_path, self._dtype, self._device) if self._arch.vision is not None else None
        return FusedWeights(self._arch, self._dtype, self._device, self._float32_head, shared, self._lora, base, tower)

    def loaded_weights(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See ReadsBackWeights."""
        assert self._weights is not None, "call load_weights() before loaded_weights()"
        return self._weights.loaded(names)

    @torch.inference_mode()
    def recompute(self) -> None:
        """See GenEngine. ValueError if the weights are not loaded."""
        if self.version < 0 and self._slots.num_live:
            raise ValueError("the generator has no weights: call load_weights() before recompute()")
        slots = self._slots
        self._blocks.evict_before(ALL_VERSIONS)
        for slot in range(slots.num_live):
            self._blocks.free(slots.blocks_of(slot))
            slots.set_blocks(slot, [])
        running = zip(slots.requests, slots.spans, strict=True)
        full: list[int] = []
        queue = {
            i: WaitingRequest(request, self._output_buffer.content(span)) for i, (request, span) in enumerate(running)
        }
        while queue:
            prefill_batch, adding, places = self._prefill_batch(), [], {}
            for slot, queued in queue.items():
                place = self._allocate(queued, prefill_batch, running=True)
                if place is AllocationFailure.FULL:
                    assert self._states is not None, "requests that shared blocks share them again"
                    full.append(slot)
                elif isinstance(place, RequestBlocks):
                    places[slot] = place
            for slot, place in places.items():
                adding.append(self._assign_blocks(slot, queue.pop(slot), place))
            queue = {slot: queued for slot, queued in queue.items() if slot not in full}
            self._compute(prefill_batch, adding)
        self._wait_again(full)

    def sleep(self) -> None:
        """See GenEngine. ValueError while requests are running."""
        if self._slots.num_live:
            raise ValueError(f"cannot sleep while {self._slots.num_live} requests are running: abort or finish them")
        self._cache.clear()
        self._blocks.clear()
        if self._states is not None:
            self._states.clear()
        self._model, self._images, self.version = None, None, -1
        if self._weights is not None and not self._weights.shared and self._lora is None:
            self._weights = None

    def wake(self) -> None:
        """See GenEngine. Memory is allocated when it is needed."""

    def close(self) -> None:
        """See GenEngine. Drops every request."""
        self.abort(list(self.progress()))
        self.sleep()

    def _admit(self) -> None:
        """Move waiting requests into free slots, in order of arrival, while blocks are available."""
        free = self.max_num_seqs - self._slots.num_live
        if not self._waiting or free < min(len(self._waiting), max(1, self.max_num_seqs // ADMISSION_SHARE)):
            return
        if self._blocks.num_free < self._blocks_needed:
            return
        queue, self._blocks_needed = list(islice(self._waiting.values(), free)), 0
        while queue and not self._blocks_needed:
            prefill_batch, adding, next_batch = self._prefill_batch(), [], []
            for queued in queue:
                place = self._allocate(queued, prefill_batch)
                if place is AllocationFailure.FULL:
                    self._blocks_needed = self._blocks.num_free + 1
                    break
                if place is AllocationFailure.NEXT_BATCH:
                    next_batch.append(queued)
                    continue
                request = queued.request
                del self._waiting[request.id]
                eos = () if request.params.ignore_eos else self._arch.eos_ids
                stop_ids, shift = (*eos, *request.params.stop_token_ids), 0
                if self._images is not None and request.media:
                    shift = self._images.shift(request, len(request.prompt_ids))
                slot = self._slots.add(queued, stop_ids, self._output_buffer.end, shift)
                adding.append(self._assign_blocks(slot, queued, place))
            self._compute(prefill_batch, adding)
            queue = next_batch

    def _prefill_batch(self) -> PrefillBatch:
        return PrefillBatch(self._blocks, share=not self._deterministic)

    def _allocate(
        self, queued: WaitingRequest, prefill_batch: PrefillBatch, running: bool = False
    ) -> RequestBlocks | AllocationFailure:
        """Allocate blocks for all tokens but the last. For a new request, one block per running request must stay free,
        so admission does not preempt any; requests that were already running are exempt."""
        tokens, request, headroom = queued.tokens(), queued.request, 0
        if self._deterministic:
            length = len(request.prompt_ids) + request.params.max_new_tokens
        elif running:
            length = len(tokens) - 1
        else:
            length, headroom = len(tokens), self._slots.num_live
        keys = tokens if self._arch.vision is None else queued.keys()
        return prefill_batch.allocate(keys[:-1], self._blocks.blocks_for(length), headroom, self.version)

    def _assign_blocks(self, slot: int, queued: WaitingRequest, place: RequestBlocks) -> _Added:
        self._slots.set_blocks(slot, place.blocks)
        self._slots.kv_version[slot] = place.version
        return _Added(slot, place, queued.tokens()[place.num_cached : -1])

    def _compute(self, prefill_batch: PrefillBatch, added: list[_Added]) -> None:
        """Copy cached blocks and states, then prefill the uncached tokens, a limited number at a time."""
        self._plan = None
        self._compact()
        self._cache.copy(prefill_batch.copies)
        if self._states is not None:
            self._states.allocate()
            self._states.start([row.slot for row in added if row.place.state is None])
            self._restore_states(row for row in added if not row.place.in_batch)
        rows = sorted((row for row in added if len(row.tokens)), key=lambda row: -len(row.tokens))
        # Sorted by length, neighbouring rows need little padding.
        for queue in ([row for row in rows if not row.start], [row for row in rows if row.start]):
            while queue:
                reads = max(row.start + len(row.tokens) for row in queue)
                count = max(1, min(PREFILL_TOKENS // len(queue[0].tokens), PREFILL_READS // reads))
                self._prefill(queue[:count])
                del queue[:count]
        self._cache.copy(prefill_batch.late_copies)
        if self._states is not None:
            self._states.keep([(row.slot, row.place.keeps) for row in added if row.place.keeps is not None])
            self._restore_states(row for row in added if row.place.in_batch)
        prefill_batch.end()
        if self._deterministic:
            self._blocks.evict_before(ALL_VERSIONS)

    def _restore_states(self, rows: Iterable[_Added]) -> None:
        """Copy the states that were kept after these rows' cached tokens to their slots."""
        assert self._states is not None
        self._states.restore([(row.place.state, row.slot) for row in rows if row.place.state is not None])

    def _prefill(self, rows: list[_Added]) -> None:
        assert self._model is not None
        slots = [row.slot for row in rows]
        starts = np.array([row.start for row in rows])
        ends = starts + [len(row.tokens) for row in rows]
        places = self._cache.places[self._slots.blocks[slots, : self._blocks.blocks_for(int(ends.max()))]]
        images = None
        if self._images is None:
            positions = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        else:
            requests = [self._slots.requests[slot] for slot in slots]
            parts = list(zip(requests, starts.tolist(), ends.tolist(), strict=True))
            positions = np.concatenate([self._images.positions(*part) for part in parts])
            images = self._images.features(parts)
        ids = np.concatenate([row.tokens for row in rows]).astype(np.int64)
        adding = PrefillAttention.plan(self._cache, places, starts, ends)
        recurrent = None
        if self._states is not None:
            at, lengths = self._tensor(np.array(slots)), self._tensor(ends - starts)
            recurrent = PrefillRows(at, lengths, adding.padded, adding.shape)
        self._model.prefill(self._tensor(ids), self._tensor(positions), self._cache, adding, images, recurrent)

    def _compact(self, trim: bool = False) -> None:
        """Move all blocks in use to their places in memory; `trim` also releases unneeded memory."""
        slots, blocks, cache = self._slots, self._blocks, self._cache
        self._decoding = None
        counts = self._read_blocks()
        read = slots.blocks[: slots.num_live, : counts.max(initial=0)]
        ids = read[np.arange(read.shape[1]) < counts[:, None]]
        shared = np.unique(ids[blocks.users[ids] > 1])
        # The attention matmul has as many rows for every block of a group as for the block with the most readers.
        doublings = np.ceil(np.log2(blocks.users[shared]))
        groups = [ids[blocks.users[ids] == 1], *(shared[doublings == d] for d in np.unique(doublings))]
        others = self._other_blocks(ids)
        if (lacking := sum(map(len, groups)) + len(others) - cache.capacity) > 0:
            # Evict before the cache grows, but keep the prompts' last blocks, which are not shared, for group members
            # that wait.
            blocks.evict(min(lacking, len(blocks.evictable) - self.max_num_seqs))
            others = self._other_blocks(ids)
        (cache.trim if trim else cache.compact)(groups, others)

    def _other_blocks(self, read: np.ndarray) -> np.ndarray:
        """int64 [n]: the blocks whose contents are kept, except the blocks in `read`."""
        kept = self._blocks.users > 0
        kept[self._blocks.evictable] = True
        kept[read] = False
        return np.flatnonzero(kept & (self._cache.places != NO_INDEX))

    def _read_blocks(self) -> np.ndarray:
        """int64 [live]: the number of blocks that each slot reads in the next iterations."""
        slots, live = self._slots, self._slots.num_live
        wanted = (slots.positions[:live] + LOOKAHEAD) // self._blocks.block_tokens + 1
        return np.minimum(wanted, slots.num_blocks[:live])

    def _plan_decoding(self) -> DecodeAttention:
        """Allocate blocks for the next tokens of every slot, and plan their reads."""
        slots, size = self._slots, self._blocks.block_tokens
        if not self._deterministic:  # otherwise, blocks are reserved at admission
            self._extend()
        self._compact()
        live = slots.num_live
        counts = np.zeros(self.max_num_seqs if self._deterministic else live, dtype=np.int64)
        counts[:live] = self._read_blocks()
        ids = slots.blocks[: len(counts), : counts.max()]
        places = np.where(np.arange(ids.shape[1]) < counts[:, None], self._cache.places[ids], 0)
        self._planned_until = self._output_buffer.end + int((counts[:live] * size - slots.positions[:live]).min())
        return DecodeAttention.plan(self._cache, places, counts, self._arch)

    def _extend(self) -> None:
        """Allocate blocks for the next tokens. If too few are free even for one token, preempt requests."""
        slots, size = self._slots, self._blocks.block_tokens
        while True:
            live = slots.num_live
            positions, held = slots.positions[:live], slots.num_blocks[:live]
            last = positions + slots.last_iteration[:live] - self._output_buffer.end
            for ahead in (LOOKAHEAD, 0):
                missing = np.maximum(np.minimum(positions + ahead, last) // size + 1 - held, 0)
                if missing.sum() <= self._blocks.num_free:
                    for slot in np.flatnonzero(missing).tolist():
                        slots.set_blocks(slot, [*slots.blocks_of(slot), *self._blocks.allocate(int(missing[slot]))])
                    return
            self._preempt(int(slots.order[:live].argmax()))

    def _preempt(self, slot: int) -> None:
        """Make a request wait again, before all others. It later continues after its last token."""
        self._insert_blocks([slot])
        self._wait_again([slot])

    def _wait_again(self, slots: Sequence[int]) -> None:
        """Free these slots; their requests wait before all others."""
        again = {
            (request := self._slots.requests[slot]).id: WaitingRequest(
                request, self._output_buffer.content(self._slots.spans[slot])
            )
            for slot in slots
        }
        self._waiting, self._blocks_needed = again | self._waiting, 0
        self._free_slots(slots)

    def _iterate(self) -> list[Output]:
        """One decode iteration: every live request gets a token. Returns the finished requests in order of slot."""
        assert self._model is not None
        slots, iteration = self._slots, self._output_buffer.end
        if self._decoding is None or iteration == self._planned_until:
            self._decoding = self._plan_decoding()
        live = slots.num_live
        rows = self.max_num_seqs if self._deterministic else live
        plan = self._plan or self._replan(rows)
        # Old values of free slots must not point past the range that is read.
        slots.positions[live:rows] = 0
        self._model.routes = None if self._routes is None else []
        tokens, positions = self._tensor(slots.tokens[:rows]), self._tensor(slots.positions[:rows])
        rotary = None
        if self._images is not None:
            rotary = self._tensor(slots.positions[:rows] + np.where(np.arange(rows) < live, slots.shifts[:rows], 0))
        logits = self._model.decode(tokens, positions, live, self._cache, self._decoding, rotary)
        routes, self._model.routes = self._model.routes, None
        uniform = self._tensor(uniforms(slots.origins[:rows], iteration))
        on_host = to_host([*sample(logits, plan, uniform), *self._recorded(routes)])
        ids, logprobs, behaviour, *chosen = (tensor.numpy() for tensor in on_host)
        if not np.isfinite(logprobs[:live]).all():
            bad = slots.requests[int(np.argmin(np.isfinite(logprobs[:live])))].id
            raise FloatingPointError(f"request {bad}: the logits are not finite under weights version {self.version}")
        self._output_buffer.write(self.version, ids, logprobs, behaviour, *chosen)
        slots.tokens[:rows] = ids
        slots.positions[:live] += 1
        return self._collect(ids[:live], iteration)

    def _recorded(self, routes: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """The chosen experts of all layers as a column for the output buffer, if they are recorded."""
        if routes is None or self._routes is None:
            return []
        chosen = torch.cat(routes, dim=1).to(getattr(torch, self._routes.travels_as))
        return [chosen.reshape(self._routes.shape(len(chosen)))]

    def _collect(self, ids: np.ndarray, iteration: int) -> list[Output]:
        """The outputs of the requests that end with these tokens (int64 [live]); frees their slots."""
        stopped = (ids[:, None] == self._slots.stop_ids[: len(ids)]).any(axis=1)
        for stop, members in self._stop_groups:
            assert self._stops is not None  # add() refuses stop strings without a tokenizer
            for slot in members[self._stops.closers(stop)[ids[members]]]:
                tail = self._output_buffer.read(self._slots.spans[slot], "token_ids", last=self._stops.window(stop))
                stopped[slot] |= self._stops.completes(stop, tail.tolist())
        done = np.flatnonzero(stopped | (self._slots.last_iteration[: len(ids)] == iteration)).tolist()
        outputs = [self._output(slot, FinishReason.STOP if stopped[slot] else FinishReason.LENGTH) for slot in done]
        self._insert_blocks([slot for slot in done if self._slots.requests[slot].continues])
        self._free_slots(done)
        return outputs

    def _output(self, slot: int, reason: FinishReason) -> Output:
        return _output(self._slots.requests[slot], self._output_buffer.content(self._slots.spans[slot]), reason)

    def _insert_blocks(self, slots: Sequence[int]) -> None:
        """Insert these slots' blocks, with all of their tokens, into the prefix cache, except if their weights are too
        old."""
        for slot in slots if not self._deterministic else ():
            version, request = int(self._slots.kv_version[slot]), self._slots.requests[slot]
            if version < self.version - self._prefix_staleness:
                continue
            held = WaitingRequest(request, self._output_buffer.content(self._slots.spans[slot]))
            tokens = held.tokens() if self._arch.vision is None else held.keys()
            cached = tokens[: self._slots.positions[slot]]
            self._blocks.insert(cached, self._slots.blocks_of(slot), version, request.continues)
            if (kept := self._blocks.keep_state(cached, expected=True)) is not None:
                assert self._states is not None
                self._states.keep([(slot, kept)])

    def _free_slots(self, done: Sequence[int]) -> None:
        """Free these slots, and move the last live requests into them."""
        if not done:
            return
        for slot in done:
            self._blocks.free(self._slots.blocks_of(slot))
        moves = self._slots.remove(done, self._output_buffer.end)
        if self._states is not None:
            self._states.move(moves)
        self._plan = self._decoding = None

    def _replan(self, rows: int) -> SamplingPlan:
        """Make the sampling plan, which is constant until a slot gets another request."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for slot, request in enumerate(self._slots.requests):
            if request.params.stop:
                groups.setdefault(request.params.stop, []).append(slot)
        self._stop_groups = [(stop, np.array(members)) for stop, members in groups.items()]
        self._plan = self._slots.plan(rows, self._arch.vocab_size, self._device)
        return self._plan

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self._device)


def _output(request: Request, columns: Mapping[str, np.ndarray], reason: FinishReason) -> Output:
    """A finished request. `columns` are as in OutputBuffer.content."""
    behaviour = columns["gen_logprobs_behaviour"] if request.params.truncates else None
    return Output(
        id=request.id,
        token_ids=columns["token_ids"],
        gen_logprobs=columns["gen_logprobs"],
        versions=columns["versions"],
        finish_reason=reason,
        gen_logprobs_behaviour=behaviour,
        columns={"routes": columns["routes"]} if "routes" in columns else {},
    )
