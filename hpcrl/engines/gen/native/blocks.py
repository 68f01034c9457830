"""Blocks of the KV cache: who uses them, and which prefixes of tokens they hold. No tensors.

A block holds the keys and values of up to `block_tokens` consecutive tokens. Requests that begin with the same tokens
use the same full blocks; the last block of a prompt, which is rarely full, is copied. Blocks that no request uses stay
as long as they are known by their tokens and their memory is not needed (vLLM's prefix caching, arXiv 2309.06180, with
tokens as keys instead of their hash).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True, eq=False)
class _Prefix:
    """A block that is known by its tokens, after those of its parents."""

    block: int
    tokens: bytes  # int32; fewer than block_tokens for the last block of a prefix
    version: int  # the oldest weights that keys and values of these tokens come from
    parent: _Prefix | None
    continues: bool = False  # a later request is expected to begin with it
    children: dict[bytes, _Prefix] = field(default_factory=dict)
    short: set[int] = field(default_factory=set)  # lengths of children that are not full


@dataclass(frozen=True, slots=True)
class Match:
    """The known beginning of some tokens: full blocks, then the first `tail_tokens` tokens of block `tail` (or None).
    version: of the oldest weights behind them, None if nothing is known."""

    blocks: list[int]
    tail: int | None = None
    tail_tokens: int = 0
    version: int | None = None


class Blocks:
    """`num_blocks` blocks with ids 0..num_blocks-1, each with the number of its users."""

    def __init__(self, num_blocks: int, block_tokens: int):
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self.clear()

    def clear(self) -> None:
        """Forget everything; nothing may be in use."""
        self.users = np.zeros(self.num_blocks, dtype=np.int32)
        self._unused = list(range(self.num_blocks - 1, -1, -1))
        self._idle: dict[int, None] = {}  # known but not in use, least recently used first
        self._known: dict[int, _Prefix] = {}
        self._root = _Prefix(-1, b"", sys.maxsize, None)

    @property
    def num_free(self) -> int:
        """The number of blocks that `take` can give."""
        return len(self._unused) + len(self._idle)

    @property
    def evictable(self) -> list[int]:
        """Blocks that are kept for their prefixes only."""
        return list(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that hold this many tokens."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """Blocks for one user; the least recently used prefixes are forgotten if too few are unused. At most
        `num_free`."""
        while len(self._unused) < count:
            # The blocks of a prefix became idle last to first: a block goes after those that continue it, unless they
            # continue another request's block of the same tokens; then nobody finds them and they go in their turn.
            self._evict(next(iter(self._idle)))
        taken = [self._unused.pop() for _ in range(count)]
        self.users[taken] = 1
        return taken

    def add_users(self, blocks: Collection[int]) -> None:
        """One more user for each of these blocks."""
        for block in blocks:
            self._idle.pop(block, None)
            self.users[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One user less for each of these blocks of one prefix, first to last."""
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block]:
                continue
            if block in self._known:
                self._idle[block] = None
            else:
                self._unused.append(block)

    def match(self, tokens: np.ndarray) -> Match:
        """The longest known beginning of `tokens` (int32 [n])."""
        found: list[int] = []
        at, size = self._root, self.block_tokens
        while child := at.children.get(tokens[len(found) * size : (len(found) + 1) * size].tobytes()):
            if len(child.tokens) < 4 * size:
                break
            at = child
            found.append(at.block)
        rest = tokens[len(found) * size :]
        if 0 < len(rest) < size:
            raw = rest.tobytes()
            for tokens_of_child, child in at.children.items():
                if tokens_of_child.startswith(raw):
                    return Match(found, child.block, len(rest), child.version)
        for length in sorted(at.short, reverse=True):
            tail = at.children.get(rest[:length].tobytes()) if length <= len(rest) else None
            if tail is not None:
                return Match(found, tail.block, length, tail.version)
        return Match(found, version=at.version if found else None)

    def insert(self, tokens: np.ndarray, blocks: Sequence[int], version: int, continues: bool = False) -> list[int]:
        """Know `blocks`, which hold `tokens` (int32 [n]), by their tokens. Returns those of them that were not known;
        where other blocks are known by the same tokens, those stay. continues: a later request is expected to begin
        with these tokens."""
        at, size, new = self._root, self.block_tokens, []
        for index, block in enumerate(blocks[: self.blocks_for(len(tokens))]):
            part = tokens[index * size : (index + 1) * size]
            key = part.tobytes()
            if key not in at.children:
                if block in self._known:  # by fewer tokens, from when it was not full
                    self._unlink(block)
                at.children[key] = self._known[block] = _Prefix(block, key, min(version, at.version), at)
                if len(part) < size:
                    at.short.add(len(part))
                new.append(block)
            at = at.children[key]
            at.continues |= continues
        return new

    def evict(self, count: int) -> None:
        """Forget up to `count` blocks, the least recently used, that no request uses or is expected to begin with."""
        for block in [block for block in self._idle if not self._known[block].continues][: max(0, count)]:
            self._evict(block)

    def evict_before(self, version: int) -> None:
        """Forget what comes from older weights than these."""
        for block in [block for block, prefix in self._known.items() if prefix.version < version]:
            self._evict(block)

    def _evict(self, block: int) -> None:
        self._unlink(block)
        if block in self._idle:
            del self._idle[block]
            self._unused.append(block)

    def _unlink(self, block: int) -> None:
        prefix = self._known.pop(block)
        assert prefix.parent is not None, "the root is not a block"
        del prefix.parent.children[prefix.tokens]
