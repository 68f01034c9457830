"""Places for the tokens of requests in the KV cache: what is known of them, and new blocks for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from hpcrl.engines.gen.native.blocks import Blocks, Match


class AllocationFailure(Enum):
    """Why a request gets no place."""

    NEXT_BATCH = auto()  # its tokens continue some that this batch computes
    FULL = auto()  # too few blocks are available


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """The blocks of a request's tokens, of which the first num_cached need not be computed; version: of the oldest
    weights behind them."""

    blocks: list[int]
    num_cached: int
    version: int


class PrefillBatch:
    """Requests admitted together; their uncached tokens are prefilled in one batch.

    share: requests use the same blocks. Else they copy blocks, of this batch only.
    """

    def __init__(self, blocks: Blocks, share: bool):
        self._blocks, self._share = blocks, share
        self._computed: set[int] = set()  # blocks whose tokens are known but are only computed in this batch
        self._pinned: list[int] = []
        self.copies: list[tuple[int, int]] = []  # (from, to), before anything is computed
        self.late_copies: list[tuple[int, int]] = []  # of what this batch computes

    def allocate(
        self, tokens: np.ndarray, num_blocks: int, headroom: int, version: int
    ) -> RequestBlocks | AllocationFailure:
        """A place of `num_blocks` for tokens (int32 [n]) that are computed with weights of this version, as long as
        `headroom` blocks stay available."""
        match, size = self._blocks.match(tokens), self._blocks.block_tokens
        in_wave = not self._computed.isdisjoint((*match.blocks, match.tail))
        if in_wave and len(match.blocks) * size + match.tail_tokens < len(tokens):
            if self._share:
                return AllocationFailure.NEXT_BATCH
            match = Match([])
        shared, copied = (match.blocks, []) if self._share else ([], match.blocks)
        # If memory is short, a tail that is kept for its prefix only is better overwritten than copied.
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
        """To be called after the copies."""
        for block in self._pinned:
            self._blocks.free([block])
