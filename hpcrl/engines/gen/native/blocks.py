"""Blocks of the KV cache: their users, and the token prefixes that they hold. No tensors.

A block holds the keys and values of up to `block_tokens` consecutive tokens. Requests that begin with equal tokens
share full blocks; a prompt's last block, which is rarely full, is copied. Blocks without a user stay in the prefix
cache until their memory is needed, as in vLLM (arXiv 2309.06180), but with tokens as keys instead of hashes.

A model with recurrent layers can continue a prefix only where the state after its last token was kept. The cache then
matches only such prefixes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True, eq=False)
class _Prefix:
    """A block in the prefix cache. Its key is its tokens; its parent holds the tokens before them."""

    block: int
    tokens: bytes  # their keys; fewer than block_tokens for the last block of a prefix
    version: int  # the oldest weights that produced keys and values up to these tokens
    parent: _Prefix | None
    continues: bool = False  # a later request is expected to begin with it
    children: dict[bytes, _Prefix] = field(default_factory=dict)
    short: set[int] = field(default_factory=set)  # lengths of children that are not full
    state: int | None = None  # the kept state after these tokens


@dataclass(frozen=True, slots=True)
class Match:
    """The cached beginning of some tokens: full blocks, then the first `tail_tokens` tokens of block `tail`."""

    blocks: list[int]
    tail: int | None = None
    tail_tokens: int = 0
    version: int | None = None  # the oldest weights that produced these keys and values; None if nothing is cached
    state: int | None = None  # the kept state after these tokens, for models with recurrent layers

    def without_tail(self) -> Match:
        """A match without `tail`; an empty one if a state is needed, since it includes the tail's tokens."""
        return Match(self.blocks, version=self.version) if self.state is None else Match([])


class Blocks:
    """Blocks with the ids 0 to num_blocks - 1 and their numbers of users.

    Args:
        num_states: Number of kept states if the model has recurrent layers.
    """

    def __init__(self, num_blocks: int, block_tokens: int, num_states: int | None = None):
        self.num_blocks, self.block_tokens, self._num_states = num_blocks, block_tokens, num_states
        self.clear()

    def clear(self) -> None:
        """Empty the prefix cache; no block may have a user."""
        self.users = np.zeros(self.num_blocks, dtype=np.int32)
        self._unused = list(range(self.num_blocks - 1, -1, -1))
        self._idle: dict[int, None] = {}  # cached but not in use, least recently used first
        self._known: dict[int, _Prefix] = {}
        self._root = _Prefix(-1, b"", sys.maxsize, None)
        self._free_states = list(range(self._num_states or 0))
        self._states: dict[int, _Prefix] = {}  # least recently used first
        self._expected: set[int] = set()  # the states from which a later request will continue

    @property
    def num_free(self) -> int:
        """The number of blocks that allocate() can return."""
        return len(self._unused) + len(self._idle)

    @property
    def evictable(self) -> list[int]:
        """Blocks that only the prefix cache holds."""
        return list(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that hold this many tokens."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks, at most num_free, for one user. If too few are unused, the least recently used prefixes are
        evicted."""
        while len(self._unused) < count:
            # free() makes a prefix's last block idle first, so a block is evicted after the blocks that continue it.
            # Blocks that continue another request's block with equal tokens may stay longer; no match finds them then,
            # and they are evicted later.
            self._evict(next(iter(self._idle)))
        taken = [self._unused.pop() for _ in range(count)]
        self.users[taken] = 1
        return taken

    def add_users(self, blocks: Collection[int]) -> None:
        """Add a user to each of these blocks."""
        for block in blocks:
            self._idle.pop(block, None)
            self.users[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Remove a user from each of these blocks of one prefix, which are in token order."""
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block]:
                continue
            if block in self._known:
                self._idle[block] = None
            else:
                self._unused.append(block)

    def match(self, tokens: np.ndarray) -> Match:
        """The longest cached beginning of `tokens`, integers [n] that identify them, always of one dtype; with
        recurrent layers, the longest that ends at a kept state."""
        if self._num_states is not None:
            return self._match_state(tokens)
        found: list[int] = []
        at, size = self._root, self.block_tokens
        while child := at.children.get(tokens[len(found) * size : (len(found) + 1) * size].tobytes()):
            if len(child.tokens) < tokens.itemsize * size:
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
        """Insert `blocks`, which hold `tokens` (as in match()), into the prefix cache; returns the inserted blocks. If
        the cache already has a block for some tokens, the old block stays and the new one is not inserted. `continues`
        means that a later request is expected to begin with these tokens. With recurrent layers, the last block is
        always inserted unless there is a state."""
        at, size, new = self._root, self.block_tokens, []
        for index, block in enumerate(blocks[: self.blocks_for(len(tokens))]):
            part = tokens[index * size : (index + 1) * size]
            key = part.tobytes()
            if key not in at.children:
                if block in self._known:  # it was cached with fewer tokens, before it was full
                    self._unlink(block)
                at.children[key] = self._known[block] = _Prefix(block, key, min(version, at.version), at)
                if len(part) < size:
                    at.short.add(len(part))
                new.append(block)
            elif self._num_states and (index + 1) * size >= len(tokens) and at.children[key].state is None:
                self._replace(at.children[key], block, min(version, at.version))
                new.append(block)
            at = at.children[key]
            at.continues |= continues
        return new

    def keep_state(self, tokens: np.ndarray, pinned: Collection[int] = (), expected: bool = False) -> int | None:
        """A place for the state after these tokens, which were inserted; None if it is kept already, if there are no
        recurrent layers, or if no other state can be dropped: one that is not in `pinned`, least recently used first.
        `expected` means that a later request will continue from it, until use_state(); for other states, such a state
        is only dropped if more than half are expected, since an episode's last one is not used."""
        if not self._num_states or not len(tokens):
            return None
        at, size = self._root, self.block_tokens
        for start in range(0, len(tokens), size):
            at = at.children[tokens[start : start + size].tobytes()]
        if at.state is not None:
            return None
        if not self._free_states:
            others = [state for state in self._states if state not in pinned]
            worst = next((state for state in others if state not in self._expected), None)
            if worst is None and others and (expected or 2 * len(self._expected) > len(self._states)):
                worst = others[0]
            if worst is None:
                return None
            self._drop_state(self._states[worst])
        at.state = self._free_states.pop()
        self._states[at.state] = at
        if expected:
            self._expected.add(at.state)
        return at.state

    def use_state(self, state: int) -> None:
        """A request continues from this state."""
        self._states[state] = self._states.pop(state)
        self._expected.discard(state)

    def evict(self, count: int) -> None:
        """Evict up to `count` blocks, least recently used first, which have no user and are not expected to be used by
        a later request."""
        for block in [block for block in self._idle if not self._known[block].continues][: max(0, count)]:
            self._evict(block)

    def evict_before(self, version: int) -> None:
        """Remove all blocks from the prefix cache whose contents older weights than this version have produced."""
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
        if prefix.state is not None:
            self._drop_state(prefix)

    def _replace(self, prefix: _Prefix, block: int, version: int) -> None:
        """Let a prefix have another block with equal tokens."""
        if block == prefix.block:
            return
        if block in self._known:
            self._unlink(block)
        del self._known[prefix.block]
        if prefix.block in self._idle:
            del self._idle[prefix.block]
            self._unused.append(prefix.block)
        prefix.block, prefix.version = block, min(prefix.version, version)
        self._known[block] = prefix

    def _drop_state(self, prefix: _Prefix) -> None:
        assert prefix.state is not None
        del self._states[prefix.state]
        self._expected.discard(prefix.state)
        self._free_states.append(prefix.state)
        prefix.state = None

    def _match_state(self, tokens: np.ndarray) -> Match:
        """match() for models with recurrent layers."""
        found: list[int] = []
        best, at, size = Match([]), self._root, self.block_tokens
        while True:
            rest = tokens[len(found) * size :]
            for length in sorted(at.short, reverse=True):
                tail = at.children.get(rest[:length].tobytes()) if length <= len(rest) else None
                if tail is not None and tail.state is not None:
                    best = Match(list(found), tail.block, length, tail.version, tail.state)
                    break
            child = at.children.get(rest[:size].tobytes()) if len(rest) >= size else None
            if child is None:
                break
            at = child
            found.append(at.block)
            if at.state is not None:
                best = Match(list(found), version=at.version, state=at.state)
        return best
