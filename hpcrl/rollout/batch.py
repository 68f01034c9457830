"""The trainer's batch: packed 1-D tensors with cumulative sequence lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcrl.rollout.types import Sample

TOKEN_FIELDS = ("token_ids", "loss_mask", "gen_logprobs", "versions", "turn_ids", "position_ids")
LATE_TOKEN_FIELDS = ("gen_logprobs_behaviour", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")
ROW_FIELDS = ("rewards", "scores", "group_ids", "sample_ids", "status", "weights")
DTYPES = {
    "token_ids": torch.int64,
    "loss_mask": torch.bool,
    "versions": torch.int32,
    "turn_ids": torch.int32,
    "position_ids": torch.int64,
    "group_ids": torch.int64,
    "sample_ids": torch.int64,
    "status": torch.int8,
}  # everything else is float32
STATUS = ("stop", "length", "abort")

MicroBatches = Sequence[Sequence[int]]
"""Row indices of this rank's batch per micro-batch. The same number of micro-batches on every rank; an empty one runs
as a zero-weight micro-batch, because its forward and backward take part in collectives."""


@dataclass(frozen=True)
class Norms:
    """Denominators of a loss over the whole mini-batch of all ranks, so that its split never changes a gradient.

    tokens: sum of loss_mask x row weight. sequences: sum of row weights over rows with a masked token.
    """

    tokens: float
    sequences: float


@dataclass
class Batch:
    """B sequences packed into T tokens. A token's log-prob, advantage and so on stand at that token's own index;
    the first token of a sequence has none (0, mask 0).

    cu_seqlens: int64 [B + 1]. Token fields: [T]. Row fields: [B]. Late fields are None until a command fills them.
    """

    cu_seqlens: Tensor
    token_ids: Tensor
    loss_mask: Tensor
    gen_logprobs: Tensor
    versions: Tensor
    turn_ids: Tensor
    position_ids: Tensor
    rewards: Tensor
    scores: Tensor
    group_ids: Tensor
    sample_ids: Tensor
    status: Tensor
    weights: Tensor
    gen_logprobs_behaviour: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def lengths(self) -> Tensor:
        """int64 [B]: tokens per sequence."""
        return self.cu_seqlens.diff()

    @property
    def row_ids(self) -> Tensor:
        """int64 [T]: the row each token belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_sequences, device=self.cu_seqlens.device), self.lengths)

    def prefix_lengths(self) -> Tensor:
        """int64 [B]: tokens of each row before the first that is trained on; all of them where none is."""
        starts, ends = self.cu_seqlens[:-1], self.cu_seqlens[1:]
        trained = torch.cat([self.loss_mask.nonzero()[:, 0], ends[-1:]])
        return torch.minimum(trained[torch.searchsorted(trained[:-1], starts)], ends) - starts

    def check(self) -> Batch:
        """Return self; ValueError names the first field whose shape, dtype or content breaks the contract."""
        total, rows = self.num_tokens, self.num_sequences
        if self.cu_seqlens[0] != 0 or self.cu_seqlens[-1] != total or (rows and bool((self.lengths <= 0).any())):
            raise ValueError(f"batch.cu_seqlens must rise from 0 to {total}, got {self.cu_seqlens.tolist()[:8]}...")
        for name in TOKEN_FIELDS + LATE_TOKEN_FIELDS + ROW_FIELDS:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            size, dtype = rows if name in ROW_FIELDS else total, DTYPES.get(name, torch.float32)
            if tensor.shape != (size,) or tensor.dtype != dtype:
                raise ValueError(f"batch.{name} must be {dtype} [{size}], got {tensor.dtype} {list(tensor.shape)}")
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError(
                    f"batch.{name} holds {int((~torch.isfinite(tensor)).sum())} values that are not finite"
                )
        if rows and bool(self.loss_mask[self.cu_seqlens[:-1]].any()):
            raise ValueError("batch.loss_mask marks the first token of a sequence, which has no log-prob")
        return self

    def select(self, rows: Sequence[int]) -> Batch:
        """A new batch of these rows in this order (rows may repeat)."""
        starts, ends = self.cu_seqlens[:-1].tolist(), self.cu_seqlens[1:].tolist()
        device = self.token_ids.device
        index = (
            torch.cat([torch.arange(starts[r], ends[r], device=device) for r in rows])
            if rows
            else torch.empty(0, dtype=torch.int64, device=device)
        )
        row_index = torch.tensor(list(rows), dtype=torch.int64, device=device)
        lengths = torch.tensor([ends[r] - starts[r] for r in rows], dtype=torch.int64, device=device)
        picked = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, tensor in picked.items():
            if name != "cu_seqlens" and tensor is not None:
                picked[name] = tensor[row_index if name in ROW_FIELDS else index]
        picked["cu_seqlens"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return Batch(**picked)

    def as_generated(self) -> Batch:
        """The same rows without what training adds to them."""
        added: dict[str, Any] = {name: None for name in LATE_TOKEN_FIELDS if name != "gen_logprobs_behaviour"}
        return replace(self, **added)

    def to(self, device: torch.device | str) -> Batch:
        moved = {f.name: t.to(device) for f in fields(self) if (t := getattr(self, f.name)) is not None}
        return replace(self, **moved)


def concat(batches: Sequence[Batch]) -> Batch:
    """One batch of all rows in order. A late field must be present in all of them or in none."""
    if not batches:
        return batch_from_samples([], [])
    lengths = torch.cat([b.lengths for b in batches])
    joined: dict[str, Any] = {"cu_seqlens": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])}
    for name in TOKEN_FIELDS + LATE_TOKEN_FIELDS + ROW_FIELDS:
        parts = [getattr(b, name) for b in batches]
        if any(p is None for p in parts):
            if any(p is not None for p in parts):
                raise ValueError(f"batch.{name} is present in some of the batches to join and absent in others")
            joined[name] = None
        else:
            joined[name] = torch.cat(parts)
    return Batch(**joined)


def batch_from_samples(samples: Sequence[Sample], group_ids: Sequence[int]) -> Batch:
    """Pack samples in the given order; weights are 1, position_ids restart per sequence."""
    lengths = torch.tensor([len(s.token_ids) for s in samples], dtype=torch.int64)

    def tokens(name: str) -> Tensor:
        dtype = DTYPES.get(name, torch.float32)
        parts = [torch.from_numpy(np.ascontiguousarray(getattr(s, name))).to(dtype) for s in samples]
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)

    truncated = bool(samples) and all(s.gen_logprobs_behaviour is not None for s in samples)
    positions = [torch.arange(n) for n in lengths.tolist()]
    return Batch(
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        position_ids=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
        scores=torch.tensor([s.score for s in samples], dtype=torch.float32),
        group_ids=torch.tensor(list(group_ids), dtype=torch.int64),
        sample_ids=torch.tensor([s.id for s in samples], dtype=torch.int64),
        status=torch.tensor([STATUS.index(s.finish_reason) for s in samples], dtype=torch.int8),
        weights=torch.ones(len(samples)),
        gen_logprobs_behaviour=tokens("gen_logprobs_behaviour") if truncated else None,
        **{name: tokens(name) for name in TOKEN_FIELDS if name != "position_ids"},
    )
