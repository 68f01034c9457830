"""The media of prompts and observations, as data, messages, engines and rollouts exchange them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from hpcrl.spec.trajectory import Field, Level, Origin

if TYPE_CHECKING:
    import numpy as np

IMAGE = "image"
IMAGE_MARK = "\ue001"
"""Stands in a message's content where an image is; of the private use area, and removed from all other texts."""
WRITTEN_MARK = "<image>"
"""The place of an image in a text of published data sets (verl, ROLL, ShareGPT), and in texts that leave hpcrl."""
MAX_PIXEL_BYTES = 24 << 20
"""Limit for the pixels of a row's images, which are sent in one message with it (hpcrl.data.rows.MAX_ROW_BYTES)."""
DIGEST_WORDS = 4
IMAGES = Field(
    "images",
    "int64",
    Level.ROW,
    Origin.GENERATOR,
    "per image: its first token in the row, number of tokens, width and height in pixels, and SHA-256 in four words; "
    "only of models that take images",
    width=4 + DIGEST_WORDS,
    ragged=True,
)
"""The field of a run whose model takes images; hpcrl.models.families.vision_of() declares it."""


class Medium(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, weakref=True):
    """One medium of a sequence of tokens.

    Args:
        kind: What it is, such as IMAGE.
        content: An image's pixels as the model sees them: height x width x 3 bytes, RGB, row by row.
        width: Pixels of a row.
        height: Number of rows.
        start: Its first token.
        length: Its number of tokens.
        row: Of a part of a picture, from 1; 0 for a whole picture. Models that see pictures in parts get a picture's
            parts first, then all of it.
        column: Likewise.
        sha256: The digest, if it was computed before.
    """

    kind: str
    content: bytes
    width: int = 0
    height: int = 0
    start: int = 0
    length: int = 0
    row: int = 0
    column: int = 0
    sha256: bytes = b""

    @property
    def digest(self) -> bytes:
        """SHA-256 of size and content: equal media have equal digests, whatever their files are."""
        if self.sha256:
            return self.sha256
        return hashlib.sha256(struct.pack("<II", self.width, self.height) + self.content).digest()

    @property
    def identity(self) -> tuple[bytes, int, int]:
        """Equal for equal pictures at equal places."""
        return self.digest, self.start, self.length

    @property
    def pixels(self) -> np.ndarray:
        """An image's uint8 [height, width, 3]."""
        import numpy as np  # at the top, reading a configuration would import it

        return np.frombuffer(self.content, np.uint8).reshape(self.height, self.width, 3)


def placed(medium: Medium, offset: int) -> Medium:
    """The medium with its tokens this much later."""
    return msgspec.structs.replace(medium, start=medium.start + offset) if offset else medium


def by_picture(media: Iterable[Medium]) -> list[list[Medium]]:
    """The media of each picture: its parts, if the model sees parts, and all of it."""
    found: list[list[Medium]] = []
    is_open = False
    for medium in media:
        if is_open:
            found[-1].append(medium)
        else:
            found.append([medium])
        is_open = medium.row > 0
    return found


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """A row of the field `images`."""

    start: int
    length: int
    width: int
    height: int
    digest: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of its pixels."""
        return self.width * self.height * 3


def placed_span(span: ImageSpan, offset: int) -> ImageSpan:
    """The image with its tokens this much later."""
    return msgspec.structs.replace(span, start=span.start + offset)
