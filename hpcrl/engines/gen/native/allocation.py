"""Allocate blocks of the KV cache for a request's tokens: cached blocks, and new ones for uncached tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from hpcrl.engines.gen.native.blocks import Blocks, Match


class AllocationFailure(Enum):
    """Why no blocks were allocated for a request."""

    NEXT_BATCH = auto()  # its tokens continue tokens that this batch computes
    FULL = auto()  # too few blocks are available


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """The blocks of a request's tokens; the first num_cached tokens need no prefill.

    Args:
        version: the oldest weights that produced the cached keys and values.
    """

    blocks: list[int]
    num_cached: int
    version: int


class PrefillBatch:
    """Requests admitted together; their uncached tokens are prefilled in one batch.

    Args:
        share: requests share blocks. Otherwise they copy blocks, and only blocks of this batch.
    """

    def __init__(self, blocks: Blocks, share: bool):
        self._blocks, self._share = blocks, share
        self._computed: set[int] = set()  # blocks that are in the prefix cache but are only computed in this batch
        self._pinned: list[int] = []
        self.copies: list[tuple[int, int]] = []  # (from, to), before anything is computed
        self.late_copies: list[tuple[int, int]] = []  # copies of blocks that this batch computes

    def allocate(
        self, tokens: np.ndarray, num_blocks: int, headroom: int, version: int
    ) -> RequestBlocks | AllocationFailure:
        """Allocate `num_blocks` blocks for tokens (int32 [n]) that are computed with weights of this version, if
        `headroom` blocks remain available."""
        match, size = self._blocks.match(tokens), self._blocks.block_tokens
        in_wave = not self._computed.isdisjoint((*match.blocks, match.tail))
        if in_wave and len(match.blocks) * size + match.tail_tokens < len(tokens):
            if self._share:
                return AllocationFailure.NEXT_BATCH
            match = Match([])
        shared, copied = (match.blocks, []) if self._share else ([], match.blocks)
        # If memory is short, overwriting a tail that only the prefix cache holds is better than copying it.
        for tail in ([match.tail], []) if match.tail is not None else ([],):
            copies = [*copied, *tail]
            self._blocks.add_users((*shared, *copies))
            if num_blocks - len(shared) + headroom <= self._blocks.num_free:
                break
            self._blocks.free((*shared, *copies))
        else:
            return AllocationFailure.FULL
        new = self._blocks.allocate(num_blocks - len(shared))
        (self.late_copies if in_wave else self.copies).extend(zip(copies, new, strict=False))
        self._pinned += copies
        if match.version is not None:
            version = min(version, match.version)
        place = RequestBlocks([*shared, *new], len(match.blocks) * size + (match.tail_tokens if tail else 0), version)
        self._computed.update(self._blocks.insert(tokens, place.blocks, version))
        return place

    def end(self) -> None:
        """Call it after the copies."""
        for block in self._pinned:
            self._blocks.free([block])
