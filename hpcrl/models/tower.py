"""The sizes of a model's vision tower."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

PREFIX = "model.visual."
"""Begins the names of a tower's parameters, in transformers' memory."""
CHANNELS = 3
MERGER = re.compile(r"merger|projector|connector|embed_vision")
"""In a parameter's name if it belongs to the layers between the vision tower and the decoder."""


def part_of(name: str) -> Literal["vision", "merger"]:
    """The part of a parameter outside the decoder: vision, the tower without its merger, or merger, the layers that
    turn the tower's features into embeddings of tokens."""
    return "merger" if MERGER.search(name) else "vision"


@dataclass(frozen=True)
class Tower:
    """A vision tower as in Qwen-VL models.

    Args:
        depth: Number of blocks.
        hidden_size: Width of a patch's states.
        intermediate_size: Width of a block's feed-forward layer.
        num_heads: Attention heads of a block.
        patch_size: Side of a patch, pixels.
        merge: Side of the square of patches that become one token.
        frames: Number of equal frames that represent a still image.
        out_size: Width of a token's features.
        gated: Whether feed-forward layers are gated and norms are RMSNorm; otherwise they are neither.
        num_mergers: Layers that make a token's features of its patches: one for the decoder's input, and one for each
            of the decoder's layers that also get features.
        num_positions: Rows of the table of learned positions; 0 without one.
        row_tokens: Tokens of a row's images at most, where the rows are known.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    merge: int
    frames: int
    out_size: int
    gated: bool
    num_mergers: int = 1
    num_positions: int = 0
    row_tokens: int | None = None

    @property
    def patch_values(self) -> int:
        """Numbers of a patch in the tower's input."""
        return CHANNELS * self.frames * self.patch_size**2

    @property
    def patches(self) -> int:
        """Patches of a token."""
        return self.merge**2

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a token's pixels, as data, generators and trainers exchange them."""
        return CHANNELS * self.patches * self.patch_size**2
