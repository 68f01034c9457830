"""A micro-batch as Megatron's packed tokens, padded if ranks share sequences, and split over these ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hpcrl.engines.train.megatron.delta_mixer import Sequences
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.device_copies import to_device


@dataclass(frozen=True)
class Packed:
    """One context-parallel rank's share of a micro-batch.

    Args:
        token_ids: int64 [t], this rank's tokens.
        positions: int64 [t], their positions.
        sequences: All ranks' sequences.
        own: int64 [n], indices into `places` of the tokens that this rank predicts.
        before: int64 [n], indices into `token_ids` of the tokens before the predicted ones.
        targets: int64 [n], the tokens to predict.
        places: int64 [N], indices of all tokens to predict in the micro-batch.
        sources: int64 [t], indices of `token_ids` in the micro-batch; -1: padding.
    """

    token_ids: Tensor
    positions: Tensor
    sequences: Sequences
    own: Tensor
    before: Tensor
    targets: Tensor
    places: Tensor
    sources: Tensor

    def to(self, device: torch.device) -> Packed:
        """A copy on a device, without waiting for the transfer."""

        def moved(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: to_device(value, device) for name, value in values.items() if isinstance(value, Tensor)}

        sequences = replace(self.sequences, **moved(vars(self.sequences)))
        return replace(self, **moved(vars(self)), sequences=sequences)


def padded_lengths(lengths: Sequence[int], num_ranks: int, tensor_parallel: int) -> list[int]:
    """Padded lengths of sequences for num_ranks context-parallel ranks. Each sequence is padded at its end to a
    multiple of 2 num_ranks, and a last sequence of padding makes the ranks' token counts equal. `tensor_parallel` is
    the number of ranks that share a rank's tokens (sequence parallelism), else 1."""
    unit = 2 * num_ranks if num_ranks > 1 else 1
    padded = [-(-length // unit) * unit for length in lengths]
    lacking = -sum(padded) % math.lcm(unit, num_ranks * tensor_parallel)
    return padded + [lacking] * (lacking > 0) or [math.lcm(unit, num_ranks * tensor_parallel)]


def pack(batch: Batch, num_ranks: int, rank: int, tensor_parallel: int, least: int = 0) -> Packed:
    """Pack a micro-batch's rows for one of num_ranks context-parallel ranks. Sequences are padded as in
    padded_lengths(), and by a last sequence of padding if there are fewer than `least` tokens over all ranks. No token
    attends to padding. ValueError for positions with several axes."""
    if batch.position_ids.dim() > 1:
        axes = batch.position_ids.shape[1]
        raise ValueError(
            f"batch.position_ids has {axes} axes; trainer.engine=megatron knows one, use fsdp2 or deepspeed"
        )
    device = batch.token_ids.device
    padded = padded_lengths(batch.segment_lengths.tolist(), num_ranks, tensor_parallel)
    if lacking := max(0, least - sum(padded)):
        padded.append(lacking)
    spans = torch.tensor(padded, device=device)
    starts = torch.cat([spans.new_zeros(1), spans.cumsum(0)])
    at = starts[batch.segment_ids] + batch.segment_indices  # each token's index, with padding
    sources = torch.full((sum(padded),), -1, device=device)
    sources[at] = torch.arange(batch.num_tokens, device=device)
    tokens = torch.zeros_like(sources)
    tokens[at] = batch.token_ids.long()
    places = batch.loss_mask.nonzero()[:, 0]
    before, targets = at[places - 1], batch.token_ids.long()[places]
    positions = torch.cat([torch.arange(span, device=device) for span in padded])
    holder, local = _divided(torch.repeat_interleave(spans, spans), positions, starts, num_ranks)
    mine = (holder == rank).nonzero()[:, 0]
    mine = mine[local[mine].argsort()]
    own = (holder[before] == rank).nonzero()[:, 0]
    cu_seqlens, longest = starts.int(), max(padded)
    # Padding counts as part of a sequence. Transformer Engine divides the padded starts over context-parallel ranks; on
    # one rank, it would only compare them with the unpadded starts on the host, in every layer.
    divided = cu_seqlens if num_ranks > 1 else None
    sequences = Sequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=divided,
        cu_seqlens_kv_padded=divided,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(padded),
    )
    return Packed(
        tokens[mine], positions[mine], sequences, own, local[before[own]], targets[own], places, sources[mine]
    )


def _divided(spans: Tensor, positions: Tensor, starts: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """(each token's rank, its index on this rank), int64 [T] each. `spans` is the length of each token's sequence."""
    first = torch.repeat_interleave(starts[:-1], starts.diff())
    if num_ranks == 1:
        return torch.zeros_like(positions), first + positions
    chunk = spans // (2 * num_ranks)
    number = positions // chunk
    late = number >= num_ranks
    rank = torch.where(late, 2 * num_ranks - 1 - number, number)
    return rank, first // num_ranks + positions % chunk + torch.where(late, chunk, 0)
