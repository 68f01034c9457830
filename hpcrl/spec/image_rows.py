"""Values of the field `images`, and keys of token sequences with images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hpcrl.spec.media import IMAGES, ImageSpan, Medium


def image_rows(media: Sequence[Medium]) -> np.ndarray:
    """int64 [n, width of IMAGES]: values of the field `images` for these images."""
    rows = np.empty((len(media), IMAGES.width), np.int64)
    for row, medium in zip(rows, media, strict=True):
        row[:4] = medium.start, medium.length, medium.width, medium.height
        row[4:] = np.frombuffer(medium.digest, "<i8")
    return rows


def image_spans(rows: np.ndarray) -> list[ImageSpan]:
    """The images of such values."""
    return [
        ImageSpan(int(row[0]), int(row[1]), int(row[2]), int(row[3]), row[4:].astype("<i8").tobytes()) for row in rows
    ]


def prefix_keys(token_ids: np.ndarray, spans: Iterable[ImageSpan]) -> np.ndarray:
    """int64 [n]: token ids in which the tokens of images are negative numbers derived from the image's digest.
    Sequences with equal keys have equal hidden states, while placeholder tokens of different images are equal."""
    keys = token_ids.astype(np.int64)
    for span in spans:
        seed = int.from_bytes(span.digest[:8], "little")
        offsets = np.arange(span.length, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        keys[span.start : span.start + span.length] = -1 - (offsets >> np.uint64(1)).astype(np.int64)
    return keys
