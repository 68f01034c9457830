"""What a teacher has told about the trained tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hpcrl.algorithms.interface import Objective, TeacherHead, required
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.device_copies import to_device
from hpcrl.spec.divergence import Divergence

WIDE = ("teacher_topk_ids", "teacher_topk_logprobs", "teacher_states")


@dataclass(frozen=True)
class TaughtTopK:
    """ids: int64 [N, k], the teacher's most probable words; logprobs: float32 [N, k], with the divergence's
    temperature."""

    divergence: Divergence
    ids: Tensor
    logprobs: Tensor

    def of(self, tokens: Tensor) -> TaughtTopK:
        """Of some of the tokens, int64 [n]."""
        return replace(self, ids=self.ids.index_select(0, tokens), logprobs=self.logprobs.index_select(0, tokens))


@dataclass(frozen=True)
class TaughtStates:
    """states: [N, D], the teacher's final hidden states before the tokens; head: its output head. With several
    teachers, teachers: int64 [N], the number of each token's; further: the heads of the teachers 1, 2, ...; D is that
    of the widest, and the states of others end with columns that are not read."""

    divergence: Divergence
    states: Tensor
    head: TeacherHead
    further: tuple[TeacherHead, ...] = ()
    teachers: Tensor | None = None

    @property
    def num_words(self) -> int:
        """Words that every teacher has."""
        return min(len(head.weight) for head in (self.head, *self.further))

    def of(self, tokens: Tensor) -> TaughtStates:
        """Of some of the tokens, int64 [n]."""
        own = None if self.teachers is None else self.teachers.index_select(0, tokens)
        return replace(self, states=self.states.index_select(0, tokens), teachers=own)


Taught = TaughtTopK | TaughtStates


def wants_divergence(objective: Objective) -> bool:
    """Whether the objective uses or logs the divergence."""
    return "divergence" in objective.outputs | objective.logged


def taught_of(
    objective: Objective, batch: Batch, places: Tensor, device: torch.device, invent: bool = False
) -> Taught | None:
    """What the batch has about the tokens `places`, int64 [N] on the batch's device, moved to `device`; None if the
    objective uses no divergence. With `invent`, values of one token if there is none. ValueError if the objective does
    not say which divergence, or the teacher's fields are not filled."""
    if not wants_divergence(objective):
        return None
    asked, name = objective.divergence, type(objective).__name__
    if asked is None or asked.form == "sampled":
        has = "none" if asked is None else "of the form sampled, which needs no engine"
        raise ValueError(f"the objective {name} uses a divergence, and its own is {has}; give it one of top_k or full")
    invent = invent and not len(places)
    if asked.form == "top_k":
        reason = f"the divergence over the teacher's {asked.top_k} most probable tokens"
        ids, logprobs = (required(batch, f, reason) for f in ("teacher_topk_ids", "teacher_topk_logprobs"))
        if ids.shape != logprobs.shape or ids.shape[1:] != (asked.top_k,):
            shapes = f"batch.teacher_topk_ids {[*ids.shape]} and batch.teacher_topk_logprobs {[*logprobs.shape]}"
            raise ValueError(f"{shapes} must both have the width top_k={asked.top_k}")
        if invent:
            told = torch.arange(asked.top_k)[None], torch.full((1, asked.top_k), -1.0 - asked.top_k)
        else:
            told = ids[places].long(), logprobs[places]
        return TaughtTopK(asked, *(to_device(values, device) for values in told))
    states, head = required(batch, "teacher_states", "the divergence over the whole vocabulary"), objective.teacher_head
    if head is None:
        raise ValueError(f"the divergence over the whole vocabulary needs {name}.teacher_head, which is not set")
    heads = head, *objective.further_heads
    if states.shape[1] != max(each.weight.shape[1] for each in heads):
        raise ValueError(
            f"batch.teacher_states {[*states.shape]} are not of the teacher whose head has the shape "
            f"{', '.join(str([*each.weight.shape]) for each in heads)}; their widths must be equal"
        )
    own = None
    if objective.further_heads:
        numbers = required(batch, "teachers", "the divergence from several teachers").long()
        own = to_device(numbers.new_zeros(1) if invent else numbers[batch.row_ids[places]], device)
    given = states.new_zeros(1, states.shape[1]) if invent else states[places]
    return TaughtStates(asked, to_device(given, device), head, objective.further_heads, own)


def without_taught(batch: Batch) -> Batch:
    """The batch without the teacher's wide fields, which no loss reads."""
    kept = {name: tensor for name, tensor in batch.columns.items() if name not in WIDE}
    return replace(batch, columns=kept)
