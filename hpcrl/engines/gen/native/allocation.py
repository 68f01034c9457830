"""Allocate blocks of the KV cache for a request's tokens: cached blocks, and new ones for uncached tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from hpcrl.engines.gen.native.blocks import Blocks, Match


class AllocationFailure(Enum):
    """Why no blocks were allocated for a request."""

    NEXT_BATCH = auto()  # its tokens continue tokens that this batch computes: it can share them in the next batch
    FULL = auto()  # too few blocks are available


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """The blocks for a request's tokens."""

    blocks: list[int]
    num_cached: int  # the first num_cached tokens need no prefill
    version: int  # the oldest weights that produced the cached keys and values
    state: int | None = None  # the kept state after the cached tokens, with recurrent layers
    in_batch: bool = False  # whether the batch itself computes the cached tokens
    keeps: int | None = None  # where the state after all tokens is kept, with recurrent layers


class PrefillBatch:
    """Requests that are admitted together. Their uncached tokens are prefilled in one batch.

    Args:
        share: Whether requests share blocks. If not, they only copy blocks of this batch.
    """

    def __init__(self, blocks: Blocks, share: bool):
        self._blocks, self._share = blocks, share
        self._computed: set[int] = set()  # blocks that are in the prefix cache but are only computed in this batch
        self._pinned: list[int] = []
        self._states: set[int] = set()  # kept states that this batch reads or writes
        self.copies: list[tuple[int, int]] = []  # (from, to), to copy before anything is computed
        self.late_copies: list[tuple[int, int]] = []  # (from, to), to copy after this batch has computed the sources

    def allocate(
        self, tokens: np.ndarray, num_blocks: int, headroom: int, version: int
    ) -> RequestBlocks | AllocationFailure:
        """Allocate `num_blocks` blocks for tokens (int32 [n]), which are computed with weights of this version. Fails
        unless `headroom` blocks remain available."""
        match, size = self._blocks.match(tokens), self._blocks.block_tokens
        in_wave = not self._computed.isdisjoint((*match.blocks, match.tail))
        if in_wave and len(match.blocks) * size + match.tail_tokens < len(tokens):
            if self._share:
                return AllocationFailure.NEXT_BATCH
            match = Match([])
        # If too few blocks are free, recompute the tail: its block, if only the prefix cache holds it, can be evicted.
        for used in (match, match.without_tail()) if match.tail is not None else (match,):
            shared, copied = (used.blocks, []) if self._share else ([], used.blocks)
            copies = [*copied, *([used.tail] if used.tail is not None else [])]
            self._blocks.add_users((*shared, *copies))
            if num_blocks - len(shared) + headroom <= self._blocks.num_free:
                break
            self._blocks.free((*shared, *copies))
        else:
            return AllocationFailure.FULL
        new = self._blocks.allocate(num_blocks - len(shared))
        (self.late_copies if in_wave else self.copies).extend(zip(copies, new, strict=False))
        self._pinned += copies
        if used.version is not None:
            version = min(version, used.version)
        if used.state is not None:
            self._states.add(used.state)
            self._blocks.use_state(used.state)
        blocks = [*shared, *new]
        self._computed.update(self._blocks.insert(tokens, blocks, version))
        keeps = self._blocks.keep_state(tokens, self._states)
        if keeps is not None:
            self._states.add(keeps)
        num_cached = len(used.blocks) * size + used.tail_tokens
        return RequestBlocks(blocks, num_cached, version, used.state, in_wave, keeps)

    def end(self) -> None:
        """Release the source blocks of all copies; called once they are copied."""
        for block in self._pinned:
            self._blocks.free([block])
