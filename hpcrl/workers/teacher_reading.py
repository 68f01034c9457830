"""A teacher that reads another prompt than the policy (teacher.context): its sequences, and where its values go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hpcrl.rollout.batch import Batch
from hpcrl.spec.media import IMAGES

Judge = Callable[[Batch], Sequence[Tensor | None]]


def judge_reading(prompts: Mapping[int, bytes], batch: Batch, judge: Judge) -> Sequence[Tensor | None]:
    """What `judge` says about the tokens of `batch`, [T, ...], if each response follows the prompt in `prompts`
    (hpcrl.messaging.messages.Teach) in place of its own; 0 at the tokens of prompts. Without prompts, about `batch`
    itself. None stays None."""
    if not prompts:
        return judge(batch)
    read = with_prompts(batch, prompts)
    return [None if values is None else _moved(values, read, batch) for values in judge(read)]


def with_prompts(batch: Batch, prompts: Mapping[int, bytes]) -> Batch:
    """The rows with other prompts, by group id, which have the same images. Rows are single responses."""
    token_ids, turn_ids, loss_mask = [batch.token_ids[:0]], [batch.turn_ids[:0]], [batch.loss_mask[:0]]
    lengths = [0]
    of_rows = zip(pairwise(batch.cu_seqlens.tolist()), batch.group_ids.tolist(), _images_of_rows(batch), strict=True)
    images = [] if batch.images is None else [batch.images[:0]]
    for (first, end), group, own_images in of_rows:
        prompt = torch.from_numpy(np.frombuffer(prompts[group], dtype=np.int32).astype(np.int64))
        written = batch.turn_ids[first:end] >= 0
        response = batch.token_ids[first:end][written]
        token_ids += [prompt, response]
        turn_ids += [torch.full_like(prompt, -1, dtype=torch.int32), torch.zeros(len(response), dtype=torch.int32)]
        loss_mask += [torch.zeros_like(prompt, dtype=torch.bool), batch.loss_mask[first:end][written]]
        lengths.append(len(prompt) + len(response))
        images += [_placed(own_images, batch.token_ids[first:end], prompt)] if own_images is not None else []
    starts = torch.tensor(lengths).cumsum(0)
    columns = {"token_ids": torch.cat(token_ids), "turn_ids": torch.cat(turn_ids), "loss_mask": torch.cat(loss_mask)}
    kept = {name: batch.columns[name] for name in ("group_ids", "sample_ids", "weights")}
    if images:
        kept |= {IMAGES.name: torch.cat(images), IMAGES.counts.name: batch.columns[IMAGES.counts.name]}
    read = Batch(starts, columns | kept, pictures=batch.pictures)
    read.position_ids = read.segment_indices
    return read


def _images_of_rows(batch: Batch) -> Sequence[Tensor | None]:
    """The values of the field `images` by row; None if the batch lacks the field."""
    if batch.images is None:
        return [None] * batch.num_sequences
    return batch.images.split(batch.columns[IMAGES.counts.name].tolist())


def _placed(images: Tensor, token_ids: Tensor, prompt: Tensor) -> Tensor:
    """A row's images at their places in another prompt, where they have the same order. `token_ids` are the row's."""
    if not len(images):
        return images
    lengths, placeholder = images[:, 1], token_ids[images[0, 0]]
    places = (prompt == placeholder).nonzero()[:, 0]
    assert len(places) == int(lengths.sum()), "the source has put the row's images into the prompt"
    placed = images.clone()
    placed[:, 0] = places[lengths.cumsum(0) - lengths]
    return placed


def _moved(values: Tensor, read: Batch, batch: Batch) -> Tensor:
    """The values of the responses' tokens, at their indices in `batch`."""
    found = values.new_zeros(batch.num_tokens, *values.shape[1:])
    found[batch.turn_ids >= 0] = values[read.turn_ids >= 0]
    return found
