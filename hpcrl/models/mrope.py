"""The positions of tokens in M-RoPE (arXiv 2409.12191): time, row and column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hpcrl.spec.media import ImageSpan


def positions(num_tokens: int, images: Iterable[ImageSpan], unit: int) -> np.ndarray:
    """int64 [num_tokens, 3]: time, row and column of each token of a sequence, in M-RoPE (arXiv 2409.12191). An image's
    tokens have the time of its first token; the text after it continues after its longer side.

    Args:
        images: In the order of their tokens.
        unit: Pixels of a token's side.
    """
    found = np.empty((num_tokens, 3), np.int64)
    end, following = 0, 0  # of the tokens that have positions; the next position
    for image in images:
        text = image.start - end
        found[end : image.start] = np.arange(following, following + text)[:, None]
        following, end = following + text, image.start + image.length
        rows, columns = image.height // unit, image.width // unit
        grid = np.stack(np.meshgrid([0], np.arange(rows), np.arange(columns), indexing="ij"), -1).reshape(-1, 3)
        found[image.start : end] = following + grid
        following += max(rows, columns)
    found[end:] = np.arange(following, following + num_tokens - end)[:, None]
    return found


def axes_of_pairs(sections: Sequence[int], num_pairs: int, interleaved: bool) -> tuple[int, ...]:
    """The axis (time, row, column) whose position rotates each pair of a head's dimensions, for numbers of pairs by
    axis (mrope_section in config.json).

    Args:
        interleaved: The axes alternate, as long as an axis has pairs; all others are of time.
    """
    if interleaved:
        return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(num_pairs))
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
