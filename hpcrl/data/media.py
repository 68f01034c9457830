"""Images of a row: its column `images` or `image`, with paths or the bytes of files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.data.files import IMAGE_COLUMNS, BadRow
from hpcrl.spec.media import IMAGE, Medium

NAMES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")
"""First bytes of the formats in NAMES."""
MAX_MEDIA_BYTES = 16 << 20
"""Limit for all media of a prompt, which are sent in one message with the row (hpcrl.data.rows.MAX_ROW_BYTES)."""
IN_MESSAGES = "images in messages are not read by this version; name them in a column images"


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image of a row, not yet read: `content`, or else the file at `path`."""

    place: str
    path: Path = Path()
    content: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the file. OSError if there is none."""
        return self.path.stat().st_size if self.content is None else len(self.content)

    def beginning(self) -> bytes:
        """Its first bytes. OSError if it cannot be read."""
        if self.content is not None:
            return self.content[:16]
        with self.path.open("rb") as file:
            return file.read(16)

    def read(self) -> Medium:
        """The image. OSError if it cannot be read."""
        return Medium(IMAGE, self.path.read_bytes() if self.content is None else self.content)


def image_column(raw: dict[str, Any]) -> str | None:
    """The column of a row that holds its images; None if it has none. A row's `image` may be a text with another
    meaning, such as a container image."""
    if raw.get("images"):
        return "images"
    image = raw.get("image")
    is_image = image and (not isinstance(image, str) or image.lower().endswith(NAMES))
    return "image" if is_image else None


def images_of(value: Any, column: str, where: str, folder: Path) -> tuple[ImageFile, ...]:
    """The images of a column, each a path in `folder`, the bytes of a file, or {"bytes": ..., "path": ...} as in
    `datasets`. BadRow if one cannot be read, or if their total size is too large."""
    listed = isinstance(value, list | tuple)
    images = [
        _image(given, f"{where}: {column}[{n}]" if listed else f"{where}: {column}", folder)
        for n, given in enumerate(value if listed else [value])
    ]
    check_size(images, f"{where}: {column}")
    return tuple(images)


def read_images(images: Sequence[ImageFile]) -> tuple[Medium, ...]:
    """The images with their content. BadRow if one can no longer be read, or has grown too large."""
    try:
        if images:
            check_size(images, images[0].place)
        return tuple(image.read() for image in images)
    except OSError as error:
        raise BadRow(f"{images[0].place}: {error.filename} cannot be read: {error.strerror}") from error


def check_size(images: Sequence[ImageFile], place: str) -> None:
    """BadRow if the images are too large to be sent with their prompt."""
    if (num_bytes := sum(image.num_bytes for image in images)) > MAX_MEDIA_BYTES:
        raise BadRow(
            f"{place}: {num_bytes / 2**20:.1f} MiB of images would be sent with the prompt, at most "
            f"{MAX_MEDIA_BYTES >> 20} are; scale them down, or leave the row out"
        )


def image_in_messages(messages: Any, key: str) -> str | None:
    """The place of the first image in the messages of column `key`, None if there is none."""
    for n, message in enumerate(messages if isinstance(messages, list) else []):
        if not isinstance(message, dict):
            continue
        for name in IMAGE_COLUMNS:
            if message.get(name):
                return f"{key}[{n}].{name}"
        content = message.get("content")
        for k, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, dict) and part.get("type") in ("image", "image_url", "input_image"):
                return f"{key}[{n}].content[{k}]"
    return None


def _image(given: Any, place: str, folder: Path) -> ImageFile:
    content, path = (given.get("bytes"), given.get("path")) if isinstance(given, dict) else (None, given)
    if isinstance(path, bytes):
        content, path = path, None
    if isinstance(content, bytes) and content:
        image = ImageFile(place, content=content)
    elif isinstance(path, str) and path and content is None:
        image = ImageFile(place, folder / Path(path).expanduser())
    else:
        raise BadRow(f"{place} must be the path of a file, or bytes of a parquet or Arrow file")
    try:
        known = image.beginning().startswith(BEGINNINGS)
    except OSError as error:
        raise BadRow(f"{place}: {image.path} cannot be read: {error.strerror}") from error
    if not known:
        known_names = ", ".join(name[1:] for name in NAMES)
        raise BadRow(f"{place}: the content begins like none of {known_names}; store the image file itself")
    return image
