"""A rank's part of the vocabulary, and normalisers of logits over all parts.

A rank has all words, or consecutive words of which the other ranks of a group have the rest. Ranks of a group make the
same calls. Logits are never gathered: ranks exchange a few numbers per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.engines.train.fsdp2.logits import blocks_of


@dataclass(frozen=True)
class VocabularyPart:
    """Words `first` to `first + count - 1` of `total`, which are the first rows of this rank's matrix. Further rows of
    the matrix are padding. group: the ranks with the other words; None: this rank has all."""

    first: int
    count: int
    total: int
    group: Any = None

    @classmethod
    def of_rank(cls, num_rows: int, total: int, group: Any) -> VocabularyPart:
        """The part of this rank, if each rank of the group has a matrix of num_rows rows, in order of ranks."""
        first = dist.get_rank(group) * num_rows
        return cls(first, min(max(total - first, 0), num_rows), total, group)

    def up_to(self, total: int) -> VocabularyPart:
        """The same part of a vocabulary of which only the first `total` words count."""
        total = min(total, self.total)
        return VocabularyPart(self.first, min(max(total - self.first, 0), self.count), total, self.group)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(whether a word is in this part, its row or 0), of words of any shape."""
        places = ids - self.first
        mine = (places >= 0) & (places < self.count)
        return mine, places.masked_fill(~mine, 0)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all parts, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def log_sums(self, chunks: Sequence[Tensor]) -> Tensor:
        """float32 [C, n]: the log of the sum of exponentials of each row of C logits [n, count], over all parts; -inf
        for a row of only -inf."""
        lowest = torch.finfo(torch.float32).min
        tops = torch.stack([c.amax(-1) if self.count else c.new_full((len(c),), lowest) for c in chunks])
        if self.group is not None:
            dist.all_reduce(tops, dist.ReduceOp.MAX, self.group)
        tops.clamp_(min=lowest)
        sums = torch.zeros_like(tops)
        for number, chunk in enumerate(chunks if self.count else ()):
            for rows, block in blocks_of(chunk, 0):
                sums[number, rows] = (block - tops[number, rows, None]).exp_().sum(-1)
                del block
        return self.sum(sums).log_().add_(tops)
