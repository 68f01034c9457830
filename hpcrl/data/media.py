"""Images of a row: in its messages, or in its column `images` or `image`."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.data.files import BadRow
from hpcrl.data.messages import ImagePart, Messages
from hpcrl.data.pictures import read_picture
from hpcrl.models.vision import Vision
from hpcrl.spec.media import IMAGE_MARK, MAX_PIXEL_BYTES, WRITTEN_MARK, Medium

NAMES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")
"""First bytes of the formats in NAMES."""
MAX_FILE_BYTES = 64 << 20
"""Limit for the image files of a row."""
HEAD_BYTES = 4096
"""Of a file's beginning, which a resume compares: compressed files whose pictures differ rarely agree in it and in
their size."""
MAX_PATH_CHARS = 400
"""Characters of a path in an error."""
COLUMN_MARK = "\ue002"
"""IMAGE_MARK of a column's image, until the order of a row's images is known."""
MARKS = re.compile(f"[{IMAGE_MARK}{COLUMN_MARK}]")
SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image of a row, not yet read: `content`, or else the file at `path`, with its beginning and its size."""

    place: str
    beginning: bytes
    num_bytes: int
    path: Path = Path()
    content: bytes | None = None

    def read(self) -> bytes:
        """The file's content. OSError if it cannot be read."""
        return self.path.read_bytes() if self.content is None else self.content


def image_column(raw: dict[str, Any]) -> str | None:
    """The column of a row that holds its images; None if it has none. A row's `image` may be a text with another
    meaning, such as a container image."""
    if raw.get("images"):
        return "images"
    image = raw.get("image")
    is_image = image and (not isinstance(image, str) or image.lower().endswith(NAMES) or image.startswith("data:"))
    return "image" if is_image else None


def images_of(value: Any, column: str, where: str) -> list[ImagePart]:
    """The images of a column: one, or a list of them."""
    listed = isinstance(value, list | tuple)
    return [
        ImagePart(given, f"{where}: {column}[{n}]" if listed else f"{where}: {column}")
        for n, given in enumerate(value if listed else [value])
    ]


def place_images(messages: Messages, inside: list[ImagePart], column: list[ImagePart], where: str) -> list[ImagePart]:
    """The images of a row in the order of the IMAGE_MARKs in its messages, after images of its column got marks: at
    parts without an image (`{"type": "image"}`); or at `<image>` in the user's texts; or at the start of the user's
    first text. Changes the messages. BadRow if numbers differ.

    Args:
        inside: The images in the messages.
        column: The images of the row's column.
    """
    if any(part.given is None for part in inside):
        following = iter(column)
        found = [part if part.given is not None else next(following, part) for part in inside]
        places = sum(part.given is None for part in inside)
        if len(column) != places:
            raise BadRow(f"{where}: {len(column)} images for {places} image parts without content")
        return found
    for message in messages:
        message["content"] = message["content"] and message["content"].replace(COLUMN_MARK, "")
    asking = [message for message in messages if message["role"] == "user"]
    written = sum(message["content"].count(WRITTEN_MARK) for message in asking) if column else 0
    if written not in (0, len(column)):
        raise BadRow(f"{where}: {len(column)} images for {written} {WRITTEN_MARK} in the messages")
    if written:
        for message in asking:
            message["content"] = message["content"].replace(WRITTEN_MARK, COLUMN_MARK)
    elif asking:
        asking[0]["content"] = COLUMN_MARK * len(column) + asking[0]["content"]
    sources = {IMAGE_MARK: iter(inside), COLUMN_MARK: iter(column)}
    found = [next(sources[mark]) for message in messages for mark in MARKS.findall(message["content"] or "")]
    for message in messages:
        message["content"] = message["content"] and message["content"].replace(COLUMN_MARK, IMAGE_MARK)
    return found


def read_parts(parts: Sequence[ImagePart], folder: Path) -> tuple[ImageFile, ...]:
    """The image files of parts, whose relative paths begin in `folder`. BadRow if one cannot be read, or if their total
    size is too large."""
    images = [_image(part.given, part.place, folder) for part in parts]
    if images:
        check_size(images, images[0].place)
    return tuple(images)


def read_images(images: Sequence[ImageFile], vision: Vision | None) -> tuple[Medium, ...]:
    """The images as the model sees them. BadRow if one cannot be read or decoded, or if they are too large together."""
    found: list[Medium] = []
    num_bytes = 0
    for image in images:
        if vision is None:
            raise BadRow(f"{image.place}: the model takes no images")
        try:
            seen = read_picture(image.read(), vision)
        except OSError as error:
            raise BadRow(f"{image.place}: {image.path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise BadRow(f"{image.place}: {error}") from error
        found += seen
        num_bytes += sum(len(medium.content) for medium in seen)
        if num_bytes > MAX_PIXEL_BYTES:
            raise BadRow(
                f"{image.place}: the row's images have more than {MAX_PIXEL_BYTES >> 20} MiB of pixels, which are sent "
                "with the prompt; lower data.max_pixels, or leave the row out"
            )
    return tuple(found)


def check_size(images: Sequence[ImageFile], place: str) -> None:
    """BadRow if the files are larger than any image should be."""
    if (num_bytes := sum(image.num_bytes for image in images)) > MAX_FILE_BYTES:
        raise BadRow(
            f"{place}: the row's image files have {num_bytes / 2**20:.1f} MiB, the limit is {MAX_FILE_BYTES >> 20}; "
            "scale them down, or leave the row out"
        )


def _image(given: Any, place: str, folder: Path) -> ImageFile:
    content, path = (given.get("bytes"), given.get("path")) if isinstance(given, dict) else (None, given)
    if isinstance(path, bytes):
        content, path = path, None
    if isinstance(path, str) and path.startswith("data:"):
        content, path = _from_data_url(path, place), None
    elif isinstance(path, str) and (scheme := SCHEME.match(path)):
        if scheme[1] != "file":
            raise BadRow(f"{place}: {path[:60]!r} would have to be downloaded; store the file beside the data")
        path = path.removeprefix("file://")
    if isinstance(content, bytes) and content:
        image = ImageFile(place, content[:HEAD_BYTES], len(content), content=content)
    elif isinstance(path, str) and path and content is None:
        try:
            image = _opened(folder / Path(path).expanduser(), place)
        except RuntimeError as error:  # of a user without a home
            raise BadRow(f"{place}: {path[:MAX_PATH_CHARS]!r} is no file's path: {error}") from error
    else:
        raise BadRow(f"{place} must be a file's path, a data URL, or bytes of a parquet or Arrow file")
    if not image.beginning.startswith(BEGINNINGS):
        known_names = ", ".join(name[1:] for name in NAMES)
        raise BadRow(f"{place}: the content begins like none of {known_names}; store the image file itself")
    return image


def _opened(path: Path, place: str) -> ImageFile:
    """The image file at a path. BadRow if it cannot be read."""
    try:
        with path.open("rb") as file:
            return ImageFile(place, file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size, path)
    except OSError as error:
        raise BadRow(f"{place}: {str(path)[:MAX_PATH_CHARS]} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a null byte
        raise BadRow(f"{place}: {str(path)[:MAX_PATH_CHARS]!r} is no file's path: {error}") from error


def _from_data_url(url: str, place: str) -> bytes:
    """The file in a data URL (RFC 2397). BadRow if it is not in base64."""
    head, comma, encoded = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it has no ;base64,")
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:  # binascii.Error is one
        raise BadRow(f"{place}: {url[:40]!r}... is not an image in base64: {error}") from None
