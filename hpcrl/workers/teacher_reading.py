"""A teacher that reads another prompt than the policy (teacher.context): its sequences, and where its values go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hpcrl.rollout.batch import Batch

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
    """The rows with other prompts, by group id. Rows are single responses."""
    token_ids, turn_ids, loss_mask = [batch.token_ids[:0]], [batch.turn_ids[:0]], [batch.loss_mask[:0]]
    lengths = [0]
    for (first, end), group in zip(pairwise(batch.cu_seqlens.tolist()), batch.group_ids.tolist(), strict=True):
        prompt = torch.from_numpy(np.frombuffer(prompts[group], dtype=np.int32).astype(np.int64))
        written = batch.turn_ids[first:end] >= 0
        response = batch.token_ids[first:end][written]
        token_ids += [prompt, response]
        turn_ids += [torch.full_like(prompt, -1, dtype=torch.int32), torch.zeros(len(response), dtype=torch.int32)]
        loss_mask += [torch.zeros_like(prompt, dtype=torch.bool), batch.loss_mask[first:end][written]]
        lengths.append(len(prompt) + len(response))
    starts = torch.tensor(lengths).cumsum(0)
    columns = {"token_ids": torch.cat(token_ids), "turn_ids": torch.cat(turn_ids), "loss_mask": torch.cat(loss_mask)}
    of_rows = {name: batch.columns[name] for name in ("group_ids", "sample_ids", "weights")}
    read = Batch(starts, columns | of_rows)
    read.position_ids = read.segment_indices
    return read


def _moved(values: Tensor, read: Batch, batch: Batch) -> Tensor:
    """The values of the responses' tokens, at their indices in `batch`."""
    found = values.new_zeros(batch.num_tokens, *values.shape[1:])
    found[batch.turn_ids >= 0] = values[read.turn_ids >= 0]
    return found
