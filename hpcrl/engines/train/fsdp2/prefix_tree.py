"""Common prefixes of a micro-batch's sequences: a radix tree, whose tokens are computed once forward and backward.

Group members share their prompt, responses that begin alike their first tokens, and the turns of an episode by steps
all earlier turns that the next prompt repeats (Prefix Grouper, arXiv 2506.05433, shares prompts). The gradient does not
change, because a token's hidden states depend only on the tokens up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Shared(NamedTuple):
    """Which tokens of T concatenated sequences are packed.

    Attributes:
        kept: int64 [K], the tokens to pack.
        places: int64 [T], the index of each token among them.
        skipped: Per sequence, its first tokens that an earlier sequence has too, so only their copies are kept.
    """

    kept: Tensor
    places: Tensor
    skipped: list[int]


@dataclass
class _Node:
    """Consecutive tokens; `place` is the index of the first among the kept tokens."""

    tokens: np.ndarray
    place: int
    children: dict[int, _Node] = field(default_factory=dict)

    def split(self, length: int) -> None:
        """Keep the first `length` tokens, and move the others to a child."""
        rest = _Node(self.tokens[length:], self.place + length, self.children)
        self.tokens, self.children = self.tokens[:length], {int(rest.tokens[0]): rest}


def share_prefixes(token_ids: Tensor, lengths: Sequence[int], limits: Sequence[int] | None = None) -> Shared:
    """Share every prefix that two of the concatenated sequences have in common, at most the first limits[row] tokens
    of each. int64 [T] token_ids may be other keys, equal for tokens with equal inputs."""
    ids = token_ids.numpy()
    places = np.empty(len(ids), dtype=np.int64)
    root = _Node(ids[:0], 0)
    kept: list[np.ndarray] = []
    skipped: list[int] = []
    start = count = 0
    for row, length in enumerate(lengths):
        sequence = ids[start : start + length]
        limit = length if limits is None else limits[row]
        parent, found = _walk(root, sequence[:limit], places[start : start + limit])
        places[start + found : start + length] = np.arange(count, count + length - found)
        if found < limit:
            parent.children[int(sequence[found])] = _Node(sequence[found:limit], count)
        kept.append(np.arange(start + found, start + length))
        skipped.append(found)
        start, count = start + length, count + length - found
    return Shared(torch.from_numpy(np.concatenate(kept)), torch.from_numpy(places), skipped)


def _walk(root: _Node, sequence: np.ndarray, places: np.ndarray) -> tuple[_Node, int]:
    """Follow a sequence, and fill in the places of its tokens that are in the tree: (the node at which it leaves the
    tree, their number)."""
    node, done = root, 0
    while done < len(sequence) and (child := node.children.get(int(sequence[done]))) is not None:
        most = min(len(child.tokens), len(sequence) - done)
        differs = child.tokens[:most] != sequence[done : done + most]
        common = int(differs.argmax()) if differs.any() else most
        places[done : done + common] = np.arange(child.place, child.place + common)
        done += common
        if common < len(child.tokens):
            child.split(common)
        node = child
    return node, done
