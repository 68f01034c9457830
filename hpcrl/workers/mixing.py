"""Rollouts and rows of answers in one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.rollout.batch import Batch, concat
from hpcrl.rollout.types import ANSWER_IDS
from hpcrl.spec.trajectory import FIELDS, Field, Level


def with_answers(rollouts: Batch, answers: Batch, ce: float) -> Batch:
    """The rows of both, first the rollouts, without their texts. Answers have the weight `ce` for the cross-entropy and
    0 for everything else (hpcrl.algorithms.token_losses); all other fields that the model or a command fills are empty.
    The answers' sample ids are numbers of rows."""
    known = dict(rollouts.columns)
    if rollouts.policy_weights is None:
        known["policy_weights"] = rollouts.loss_mask.float()
    if rollouts.ce_weights is None:
        known["ce_weights"] = torch.zeros(rollouts.num_tokens)
    ids = answers.sample_ids + ANSWER_IDS
    given = answers.columns | {"sample_ids": ids, "group_ids": ids, "ce_weights": ce * answers.loss_mask}
    columns = {name: given[name] if name in given else _empty(FIELDS[name], answers, known) for name in known}
    return concat(
        [
            Batch(rollouts.cu_seqlens, known, pictures=rollouts.pictures),
            Batch(answers.cu_seqlens, columns, pictures=answers.pictures),
        ]
    )


def without_answers(batch: Batch) -> Batch:
    """The rollouts of a batch; the batch itself if it has no other rows."""
    generated = batch.sample_ids < ANSWER_IDS
    return batch if bool(generated.all()) else batch.select(generated.nonzero()[:, 0].tolist())


def _empty(field: Field, batch: Batch, known: dict[str, Tensor]) -> Tensor:
    """The values of a field that nothing has filled, in the shape of the known column."""
    counts = {
        Level.TOKEN: batch.num_tokens,
        Level.TURN: int(batch.cu_turns[-1]),
        Level.ROW: batch.num_sequences,
    }
    return unfilled(field, 0 if field.ragged else counts[field.level], known[field.name])


def unfilled(field: Field, count: int, like: Tensor) -> Tensor:
    """[count, ...]: neutral values of a field, in the shape and dtype of `like` [n, ...]."""
    if field.name == "teacher_topk_ids":  # different tokens of small probability: a finite divergence of weight 0
        return torch.arange(like.shape[1], dtype=like.dtype).repeat(count, 1)
    if field.name == "teacher_topk_logprobs":
        return like.new_full((count, like.shape[1]), -1.0 - like.shape[1])
    return like.new_full((count, *like.shape[1:]), field.fill)
