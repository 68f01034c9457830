"""Prompts that a teacher reads in place of the policy's (teacher.context), as parts of commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hpcrl.controller.batches import BatchHandle


def as_read(batch: BatchHandle) -> BatchHandle:
    """The batch with the sizes of the sequences that its teacher reads: its own prompt and the response."""
    if not batch.teacher_prompts:
        return batch
    prompts = {sample: batch.teacher_prompts[batch.prompts[sample]] for sample in batch.sizes}
    sizes = {n: replace(size, total=len(prompts[n]) + size.model) for n, size in batch.sizes.items()}
    return replace(batch, sizes=sizes)


def prompts_of(batch: BatchHandle, samples: Sequence[int]) -> dict[int, bytes]:
    """The prompts that the teacher reads for these samples, as messages.Teach has them."""
    if not batch.teacher_prompts:
        return {}
    uids = sorted({batch.prompts[sample] for sample in samples})
    return {uid: np.array(batch.teacher_prompts[uid], dtype=np.int32).tobytes() for uid in uids}
