"""The media of prompts and observations, as data, messages, engines and rollouts exchange them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from hpcrl.spec.trajectory import Field, Level, Origin

IMAGE = "image"
IMAGE_MARK = "\ue001"
"""Stands in a message's content where an image is; of the private use area, and removed from all other texts."""
WRITTEN_MARK = "<image>"
"""The place of an image in a text of published data sets (verl, ROLL, ShareGPT), and in texts that leave hpcrl."""
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
"""The field of a run whose model takes images; hpcrl.models.vision.vision_of() declares it."""


class Medium(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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
    """

    kind: str
    content: bytes
    width: int = 0
    height: int = 0
    start: int = 0
    length: int = 0
    row: int = 0
    column: int = 0

    @property
    def digest(self) -> bytes:
        """SHA-256 of size and content: equal media have equal digests, whatever their files are."""
        head = np.array([self.width, self.height], "<u4").tobytes()
        return hashlib.sha256(head + self.content).digest()

    @property
    def pixels(self) -> np.ndarray:
        """An image's uint8 [height, width, 3]."""
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


def image_rows(media: Sequence[Medium]) -> np.ndarray:
    """int64 [n, width of IMAGES]: values of the field `images` for these images."""
    rows = np.empty((len(media), IMAGES.width), np.int64)
    for row, medium in zip(rows, media, strict=True):
        row[:4] = medium.start, medium.length, medium.width, medium.height
        row[4:] = np.frombuffer(medium.digest, "<i8")
    return rows


def image_spans(rows: np.ndarray) -> list[ImageSpan]:
    """The images of such values."""
    return [ImageSpan(*row[:4].tolist(), row[4:].astype("<i8").tobytes()) for row in rows]


def prefix_keys(token_ids: np.ndarray, spans: Iterable[ImageSpan]) -> np.ndarray:
    """int64 [n]: token ids in which the tokens of images are negative numbers derived from the image's digest.
    Sequences with equal keys have equal hidden states, while placeholder tokens of different images are equal."""
    keys = token_ids.astype(np.int64)
    for span in spans:
        seed = int.from_bytes(span.digest[:8], "little")
        offsets = np.arange(span.length, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        keys[span.start : span.start + span.length] = -1 - (offsets >> np.uint64(1)).astype(np.int64)
    return keys
