"""The images of a batch among its tokens."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hpcrl.rollout.batch import Batch
from hpcrl.spec.image_rows import image_spans, prefix_keys
from hpcrl.spec.media import ImageSpan, placed_span


def spans_of(batch: Batch) -> list[ImageSpan]:
    """The images of all rows, with their places in the batch."""
    assert batch.images is not None
    starts, rows = batch.cu("images").tolist(), batch.images.numpy()
    return [
        placed_span(span, start)
        for start, (first, last) in zip(batch.cu_seqlens.tolist(), pairwise(starts), strict=False)
        for span in image_spans(rows[first:last])
    ]


def keys_of(batch: Batch) -> Tensor:
    """int64 [T]: see hpcrl.spec.image_rows.prefix_keys."""
    return torch.from_numpy(prefix_keys(batch.token_ids.numpy(), spans_of(batch)))
