"""The live requests in slots 0 to num_live - 1, with one numpy column per value that the decode loop needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpcrl.engines.gen.generation_engine import Request
from hpcrl.engines.gen.native.output_buffer import OutputSpan
from hpcrl.engines.gen.request_images import spans_of
from hpcrl.engines.gen.sampling import SamplingPlan, stream_origin
from hpcrl.spec.image_rows import prefix_keys

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits for a slot. If it was preempted, `output_so_far` has its tokens, as OutputBuffer.content()
    returns them."""

    request: Request
    output_so_far: Mapping[str, np.ndarray]

    def tokens(self) -> np.ndarray:
        """int32: its prompt and its response so far."""
        return np.concatenate((np.asarray(self.request.prompt_ids, dtype=np.int32), self.output_so_far["token_ids"]))

    def keys(self) -> np.ndarray:
        """int64: numbers that identify its tokens, for the prefix cache: placeholder tokens of images are all equal."""
        return prefix_keys(self.tokens(), spans_of(self.request))


class Slots:
    """Columns with one entry per slot; free slots have harmless old values."""

    def __init__(self, num_slots: int, max_blocks: int):
        self.num_live = self._num_added = 0
        self.requests: list[Request] = []
        self.spans: list[OutputSpan] = []
        self.slot_of: dict[int, int] = {}
        self.blocks = np.zeros((num_slots, max_blocks), dtype=np.int64)  # ids, in the order of the tokens
        self.num_blocks = np.zeros(num_slots, dtype=np.int64)
        self.kv_version = np.zeros(num_slots, dtype=np.int64)  # the oldest weights that produced its keys and values
        self.order = np.zeros(num_slots, dtype=np.int64)  # the order of admission
        self.tokens = np.zeros(num_slots, dtype=np.int64)  # the next token to feed
        self.positions = np.zeros(num_slots, dtype=np.int64)  # the index of this token in the sequence
        self.shifts = np.zeros(num_slots, dtype=np.int64)  # its position by which heads are rotated, minus this index
        self.last_iteration = np.zeros(num_slots, dtype=np.int64)  # iteration of the last allowed token
        self.stop_ids = np.full((num_slots, 1), NO_TOKEN, dtype=np.int64)
        self.origins = np.zeros(num_slots, dtype=np.uint64)
        self.temperature = np.ones(num_slots)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.top_p = np.ones(num_slots)
        self.min_p = np.zeros(num_slots)

    def _columns(self) -> list[np.ndarray]:
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def add(self, queued: WaitingRequest, stop_ids: tuple[int, ...], iteration: int, shift: int = 0) -> int:
        """Assign the next slot to a request whose next token is drawn at `iteration`; returns the slot. `shift`: by how
        much positions after its images exceed indices in the sequence (negative for large images)."""
        slot, request, params = self.num_live, queued.request, queued.request.params
        self.num_live += 1
        self._num_added += 1
        self.requests.append(request)
        self.spans.append(OutputSpan(iteration, [(slot, iteration)], queued.output_so_far))
        self.slot_of[request.id] = slot
        self.order[slot] = self._num_added
        if len(stop_ids) > self.stop_ids.shape[1]:
            more = np.full((len(self.tokens), len(stop_ids) - self.stop_ids.shape[1]), NO_TOKEN, dtype=np.int64)
            self.stop_ids = np.concatenate((self.stop_ids, more), axis=1)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
        earlier = queued.output_so_far["token_ids"]
        self.tokens[slot] = earlier[-1] if len(earlier) else request.prompt_ids[-1]
        self.positions[slot] = len(request.prompt_ids) + len(earlier) - 1
        self.shifts[slot] = shift
        first = iteration - len(earlier)  # as if the request had never been preempted
        self.last_iteration[slot] = first + params.max_new_tokens - 1
        self.origins[slot] = stream_origin(request.seed, first)
        self.temperature[slot], self.top_k[slot] = params.temperature, params.top_k
        self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p
        return slot

    def set_blocks(self, slot: int, blocks: Sequence[int]) -> None:
        """Set the ids of the slot's blocks."""
        self.num_blocks[slot] = len(blocks)
        self.blocks[slot, : len(blocks)] = blocks

    def blocks_of(self, slot: int) -> list[int]:
        """The ids of the slot's blocks."""
        return self.blocks[slot, : self.num_blocks[slot]].tolist()

    def remove(self, slots: Sequence[int], iteration: int) -> list[tuple[int, int]]:
        """Free these slots. From `iteration` on, the last live requests are in the slots that became free. Returns
        their moves (from, to)."""
        left = self.num_live - len(slots)
        gone = set(slots)
        targets = [slot for slot in sorted(gone) if slot < left]
        sources = [slot for slot in range(left, self.num_live) if slot not in gone]
        for slot in slots:
            del self.slot_of[self.requests[slot].id]
        if targets:
            for column in self._columns():
                column[targets] = column[sources]
        for source, target in zip(sources, targets, strict=True):
            self.requests[target], self.spans[target] = self.requests[source], self.spans[source]
            self.spans[target].segments.append((target, iteration))
            self.slot_of[self.requests[target].id] = target
        del self.requests[left:], self.spans[left:]
        self.num_live = left
        return list(zip(sources, targets, strict=True))

    def plan(self, rows: int, vocab_size: int, device: torch.device) -> SamplingPlan:
        """Sampling parameters of the first `rows` slots."""
        return SamplingPlan.build(
            temperature=self.temperature[:rows],
            top_k=self.top_k[:rows],
            top_p=self.top_p[:rows],
            min_p=self.min_p[:rows],
            num_live=self.num_live,
            vocab_size=vocab_size,
            device=device,
        )
