"""The trainer's batch: packed 1-D tensors with cumulative sequence lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpcrl.rollout.device_copies import to_device
from hpcrl.rollout.types import ATTEMPT_BITS, MEMBER_BITS, STATUS, Sample
from hpcrl.spec.media import IMAGES
from hpcrl.spec.trajectory import FIELDS, Field, Level, Origin, fields_of

__all__ = ["STATUS", "Batch", "MicroBatches", "Norms", "batch_from_samples", "concat", "group_ids", "on_policy", "pack"]

MicroBatches = Sequence[Sequence[int]]
"""Row indices of this rank's batch per micro-batch. Every rank has the same number of micro-batches, because forward
and backward are collective; an empty one has zero weight."""


@dataclass(frozen=True)
class Norms:
    """Denominators of a loss, over all ranks' rows of a mini-batch, so gradients do not depend on its division.

    Args:
        tokens: Sum of loss_mask x row weight.
        sequences: Sum of row weights over rows with a trained token.
    """

    tokens: float
    sequences: float


@dataclass(init=False, eq=False)
class Batch:
    """B sequences packed into T tokens and N turns. Every field of hpcrl.spec.trajectory is an attribute, None until it
    is filled: a tensor [T], [N] or [B] by its level. Wide fields are [T, width]; ragged fields are the values of all
    rows, which cu() assigns to rows. A token's values (log-prob, advantage) are at its own index; the first token of a
    sequence has none (0, mask 0).

    A row consists of one or more segments, which the model computes separately. The segments of an episode by steps are
    its turns, each after its own prompt, at whose first token `states` is not 0. Every other row is one segment.

    Args:
        cu_seqlens: int64 [B + 1].
        columns: Filled fields by name.
        texts: Fields of strings, one per row.

    Attributes:
        pictures: The pixels of the images of the field `images`, by digest (hpcrl.spec.media), on the host.
    """

    cu_seqlens: Tensor
    columns: dict[str, Tensor]
    texts: dict[str, list[str]]
    pictures: dict[bytes, bytes]
    if TYPE_CHECKING:  # the fields of hpcrl.spec.trajectory, stored in columns; a test compares both
        token_ids: Tensor
        loss_mask: Tensor
        gen_logprobs: Tensor
        versions: Tensor
        turn_ids: Tensor
        status: Tensor
        rewards: Tensor
        scores: Tensor
        position_ids: Tensor
        group_ids: Tensor
        sample_ids: Tensor
        weights: Tensor
        chosen: Tensor | None
        targets: Tensor | None
        gen_logprobs_behaviour: Tensor | None
        states: Tensor | None
        baselines: Tensor | None
        decoupled_rewards: Tensor | None
        failed: Tensor | None
        turn_rewards: Tensor | None
        token_rewards: Tensor | None
        on_policy: Tensor | None
        old_logprobs: Tensor | None
        old_entropies: Tensor | None
        ref_logprobs: Tensor | None
        teacher_topk_ids: Tensor | None
        teacher_topk_logprobs: Tensor | None
        teacher_states: Tensor | None
        teachers: Tensor | None
        values: Tensor | None
        advantages: Tensor | None
        returns: Tensor | None
        teacher_logprobs: Tensor | None
        policy_weights: Tensor | None
        ce_weights: Tensor | None
        divergence_weights: Tensor | None
        marked: Tensor | None
        high_entropy: Tensor | None
        correction_scale: Tensor | None

    def __init__(
        self,
        cu_seqlens: Tensor,
        columns: Mapping[str, Tensor] | None = None,
        texts: Mapping[str, list[str]] | None = None,
        pictures: Mapping[bytes, bytes] | None = None,
        **named: Tensor | None,
    ):
        self.cu_seqlens, self.columns, self.texts = cu_seqlens, dict(columns or {}), dict(texts or {})
        self.pictures = dict(pictures or {})
        for name, tensor in named.items():
            setattr(self, name, tensor)

    def __getattr__(self, name: str) -> Any:
        if name in FIELDS and "columns" in self.__dict__:
            return self.columns.get(name)
        raise AttributeError(f"a batch has no field {name!r}; hpcrl.spec.trajectory.declare() adds one")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Batch.__dataclass_fields__:
            super().__setattr__(name, value)
        elif name not in FIELDS:
            raise AttributeError(f"a batch has no field {name!r}; hpcrl.spec.trajectory.declare() adds one")
        elif value is None:
            self.columns.pop(name, None)
        else:
            self.columns[name] = value

    @property
    def images(self) -> Tensor | None:
        """The field `images` (hpcrl.spec.media), which a run declares whose model takes images; None without it."""
        return self.columns.get(IMAGES.name)

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.columns["token_ids"].numel()

    @property
    def lengths(self) -> Tensor:
        """int64 [B]: tokens per sequence."""
        return self.cu_seqlens.diff()

    @property
    def row_ids(self) -> Tensor:
        """int64 [T]: the row each token belongs to."""
        rows = torch.arange(self.num_sequences, device=self.cu_seqlens.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=self.num_tokens)

    @property
    def cu_segments(self) -> Tensor:
        """int64 [S + 1]: starts of the S segments, and the number of tokens."""
        if self.states is None:
            return self.cu_seqlens
        return torch.cat([self._begins().nonzero()[:, 0], self.cu_seqlens[-1:]])

    @property
    def segment_lengths(self) -> Tensor:
        """int64 [S]: tokens per segment."""
        return self.cu_segments.diff()

    @property
    def segment_ids(self) -> Tensor:
        """int64 [T]: the segment each token belongs to."""
        return self.row_ids if self.states is None else self._begins().cumsum(0) - 1

    @property
    def segment_indices(self) -> Tensor:
        """int64 [T]: the index of each token in its segment, from 0; position_ids may differ from it."""
        return torch.arange(self.num_tokens, device=self.cu_seqlens.device) - self.cu_segments[self.segment_ids]

    def _begins(self) -> Tensor:
        """bool [T]: the first token of each segment."""
        assert self.states is not None
        begins = self.states != 0
        begins[self.cu_seqlens[:-1]] = True
        return begins

    @property
    def cu_turns(self) -> Tensor:
        """int64 [B + 1]: turn t of row i is entry cu_turns[i] + t of a turn field."""
        turns = self.columns["turn_ids"].long() + 1
        counts = turns.new_zeros(self.num_sequences).scatter_reduce(0, self.row_ids, turns, "amax")
        return _offsets(counts)

    def prefix_lengths(self) -> Tensor:
        """int64 [S]: tokens of each segment before its first trained token; all of its tokens if none is trained."""
        starts, ends = self.cu_segments[:-1], self.cu_segments[1:]
        trained = torch.cat([self.loss_mask.nonzero()[:, 0], ends[-1:]])
        return torch.minimum(trained[torch.searchsorted(trained[:-1], starts)], ends) - starts

    def check(self) -> Batch:
        """Return self; ValueError names the first field with a wrong shape, dtype or content."""
        self.check_shapes()
        for name, tensor in self.columns.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                bad = int((~torch.isfinite(tensor)).sum())
                raise ValueError(f"batch.{name} holds {bad} values that are not finite")
        if self.num_sequences and bool(self.loss_mask[self.cu_segments[:-1]].any()):
            raise ValueError("batch.loss_mask marks the first token of a sequence, which has no log-prob")
        return self

    def check_shapes(self) -> None:
        """ValueError names the first field with a wrong shape or dtype."""
        total, rows = self.num_tokens, self.num_sequences
        if self.cu_seqlens[0] != 0 or self.cu_seqlens[-1] != total or (rows and bool((self.lengths <= 0).any())):
            raise ValueError(f"batch.cu_seqlens must rise from 0 to {total}, got {self.cu_seqlens.tolist()[:8]}...")
        for field in FIELDS.values():
            tensor = self.columns.get(field.name)
            if field.ragged and (tensor is None) != (field.counts.name not in self.columns):
                raise ValueError(f"batch.{field.name} and batch.{field.counts.name} must be filled together")
            if tensor is None:
                continue
            if field.ragged and bool((self.columns[field.counts.name] < 0).any()):
                raise ValueError(f"batch.{field.counts.name} has a negative number")
            size, dtype = int(self.cu(field.name)[-1]), getattr(torch, field.dtype)
            several = field.any_width and tensor.dim() == 2
            shape = (size, tensor.shape[1]) if several else field.shape(size)
            if tensor.shape != shape or tensor.dtype != dtype:
                wanted = f"{dtype} {[*shape]}"
                raise ValueError(f"batch.{field.name} must be {wanted}, got {tensor.dtype} {[*tensor.shape]}")
        for name, strings in self.texts.items():
            if len(strings) != rows:
                raise ValueError(f"batch.texts[{name!r}] has {len(strings)} strings for {rows} rows")

    def select(self, rows: Sequence[int]) -> Batch:
        """A new batch of these rows in this order (rows may repeat)."""
        units = {name: name if FIELDS[name].ragged else FIELDS[name].level for name in self.columns}
        index = {unit: _select(self.cu(name), rows) for unit, name in {units[name]: name for name in units}.items()}
        chosen = torch.tensor(list(rows), dtype=torch.int64, device=self.cu_seqlens.device)
        return Batch(
            _offsets(self.lengths[chosen]),
            {name: tensor[index[units[name]]] for name, tensor in self.columns.items()},
            {name: [strings[row] for row in rows] for name, strings in self.texts.items()},
            self.pictures,
        )

    def as_generated(self) -> Batch:
        """The same rows without the fields that training adds."""
        kept = {name: tensor for name, tensor in self.columns.items() if FIELDS[name].origin is not Origin.TRAINING}
        return replace(self, columns=kept | {"weights": torch.ones_like(self.weights)})

    def to(self, device: torch.device | str) -> Batch:
        moved = {name: to_device(tensor, device) for name, tensor in self.columns.items()}
        return Batch(to_device(self.cu_seqlens, device), moved, self.texts, self.pictures)

    def cu(self, name: str) -> Tensor:
        """int64 [B + 1]: row i has the values cu[i] to cu[i + 1] - 1 of this field."""
        field, level = FIELDS[name], FIELDS[name].level
        if field.ragged:
            return _offsets(self.columns[field.counts.name])
        if level is Level.ROW:
            return torch.arange(self.num_sequences + 1, device=self.cu_seqlens.device)
        return self.cu_seqlens if level is Level.TOKEN else self.cu_turns


def oldest_versions(batch: Batch) -> Tensor:
    """int64 [B]: the oldest weight version of each row's model tokens without an expert's; the largest int64 for rows
    without any."""
    drawn = batch.loss_mask & (batch.versions >= 0)
    rows, versions = batch.row_ids[drawn], batch.versions[drawn].long()
    oldest = versions.new_full((batch.num_sequences,), torch.iinfo(torch.int64).max)
    return oldest.scatter_reduce(0, rows, versions, "amin")


def on_policy(batch: Batch, version: int, recomputed: bool) -> Tensor:
    """bool [T]: model tokens for which a trainer with weights `version` and the generator compute the same function.
    Unless the generator's cache is `recomputed` when weights arrive, later tokens read a cache from older weights; then
    all tokens of the row must be of this version."""
    same = batch.loss_mask & (batch.versions == version)
    return same if recomputed else same & (oldest_versions(batch) == version)[batch.row_ids]


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _select(cu: Tensor, rows: Sequence[int]) -> Tensor:
    """Indices of these rows' values."""
    starts, device = cu.tolist(), cu.device
    parts = [torch.arange(starts[row], starts[row + 1], device=device) for row in rows]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def concat(batches: Sequence[Batch]) -> Batch:
    """One batch of all rows in order. ValueError if a field is filled in only some of the batches."""
    if not batches:
        return batch_from_samples([], [])
    columns: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for batch in batches for name in (*batch.columns, *batch.texts)):
        if not all(name in batch.columns or name in batch.texts for batch in batches):
            raise ValueError(f"batch.{name} is present in some of the batches to join and absent in others")
        if name in batches[0].columns:
            columns[name] = torch.cat([batch.columns[name] for batch in batches])
    texts = {name: [text for batch in batches for text in batch.texts[name]] for name in batches[0].texts}
    pictures = {digest: pixels for batch in batches for digest, pixels in batch.pictures.items()}
    return Batch(_offsets(torch.cat([batch.lengths for batch in batches])), columns, texts, pictures)


def group_ids(sample_ids: Tensor) -> Tensor:
    """int64 [n]: the prompt of each sample."""
    return sample_ids >> (ATTEMPT_BITS + MEMBER_BITS)


def pack(
    sample_ids: Sequence[int],
    lengths: Sequence[int],
    columns: Mapping[str, np.ndarray],
    texts: Mapping[str, list[str]] | None = None,
    turn_rewards: Sequence[Sequence[float] | np.ndarray] | None = None,
    token_rewards: Sequence[np.ndarray] | None = None,
) -> Batch:
    """Pack rows in the given order and fill derived fields. Weights are 1; position_ids are indices in the segment.

    Args:
        columns: Flat arrays of fields, in their transfer dtypes.
        turn_rewards: Per row, the rewards of its first turns; if empty, the last turn has the row's reward. With
            turn_rewards, both reward fields (of turns and of tokens) are filled.
        token_rewards: Per row, rewards of some tokens (hpcrl.rollout.types.TOKEN_REWARD), included in turn_rewards. A
            turn's last model token gets the rest of the turn's reward.
    """
    ids, counts = (torch.tensor(list(numbers), dtype=torch.int64) for numbers in (sample_ids, lengths))
    filled = {name: _tensor(FIELDS[name], column) for name, column in columns.items()}
    filled |= {
        "position_ids": Batch(_offsets(counts), filled).segment_indices,
        "group_ids": group_ids(ids),
        "sample_ids": ids,
        "weights": torch.ones(len(ids)),
    }
    batch = Batch(_offsets(counts), filled, texts)
    if turn_rewards is not None:
        batch.turn_rewards = _spread(turn_rewards, batch)
        batch.token_rewards = place_rewards(token_rewards, batch)
    return batch


def _spread(given: Sequence[Sequence[float] | np.ndarray], batch: Batch) -> Tensor:
    """float32 [N]: the rewards of all turns."""
    ends = batch.cu_turns.tolist()
    rewards = torch.zeros(ends[-1])
    for row, (start, end) in enumerate(pairwise(ends)):
        if len(given[row]):
            known = torch.tensor(given[row][: end - start], dtype=torch.float32)
            rewards[start : start + len(known)] = known
        elif end > start:
            rewards[end - 1] = batch.rewards[row]
    return rewards


def place_rewards(given: Sequence[np.ndarray] | None, batch: Batch) -> Tensor:
    """float32 [T]: the rewards of all tokens."""
    placed = torch.zeros(batch.num_tokens)
    written = batch.loss_mask.nonzero()[:, 0]
    turns = batch.cu_turns[batch.row_ids[written]] + batch.turn_ids[written].long()  # sorted
    rest = batch.turn_rewards
    assert rest is not None
    if given is not None:
        starts = torch.searchsorted(written, batch.cu_seqlens[:-1]).tolist()
        for start, values in zip(starts, given, strict=True):
            if len(values):
                places = torch.from_numpy(values["position"].astype(np.int64))
                placed[written[start + places]] = torch.from_numpy(values["reward"].astype(np.float32))
        sums = torch.zeros(len(rest), dtype=torch.float64).index_add(0, turns, placed[written].double())
        rest = rest - sums.float()
    ends = torch.ones_like(turns, dtype=torch.bool)
    ends[:-1] = turns[1:] != turns[:-1]
    placed[written[ends]] += rest[turns[ends]]
    return placed


def _tensor(field: Field, column: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(column, dtype=field.dtype))


def batch_from_samples(samples: Sequence[Sample], group_ids: Sequence[int]) -> Batch:
    """Pack samples in the given order, with these group ids. Optional fields are packed if all samples have them."""
    columns: dict[str, np.ndarray] = {
        "rewards": np.array([sample.reward for sample in samples]),
        "scores": np.array([sample.score for sample in samples]),
    }
    for field in fields_of(Origin.GENERATOR):
        arrays: list[Any] = [sample.columns.get(field.name) for sample in samples]
        if not field.optional or (samples and all(array is not None for array in arrays)):
            columns[field.name] = np.concatenate(arrays or [np.empty(field.shape(0))])
    batch = pack([sample.id for sample in samples], [len(sample.token_ids) for sample in samples], columns)
    batch.group_ids = torch.tensor(list(group_ids), dtype=torch.int64)
    batch.pictures = {digest: pixels for sample in samples for digest, pixels in sample.pictures.items()}
    return batch
