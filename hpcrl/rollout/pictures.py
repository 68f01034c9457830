"""Images of rollouts outside the batch: joined to one array for transfers and checkpoints, and as files of a run."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from hpcrl.spec.image_rows import image_spans
from hpcrl.spec.media import ImageSpan, Medium
from hpcrl.system.files import write_durably

FOLDER = "pictures"
"""Folder within a run's rollouts/ with one PNG per image, named by its digest, in subfolders of two digits."""


MAX_SHOWN, MAX_SIDE = 64, 512
"""Pages show this many pictures of an episode, with sides of at most this many pixels: 48 MiB."""


def thumbnail(picture: Medium) -> Medium:
    """The picture in a size for pages."""
    if max(picture.width, picture.height) <= MAX_SIDE:
        return picture
    image = Image.fromarray(picture.pixels)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return Medium(picture.kind, image.tobytes(), image.width, image.height)


def different(images: np.ndarray) -> dict[bytes, ImageSpan]:
    """By digest, the first of equal images among values of the field `images`, in their order."""
    found: dict[bytes, ImageSpan] = {}
    for span in image_spans(images):
        found.setdefault(span.digest, span)
    return found


def joined(images: np.ndarray, pictures: Mapping[bytes, bytes]) -> np.ndarray:
    """uint8: the pixels of the different images, one after the other."""
    return np.frombuffer(b"".join(pictures[digest] for digest in different(images)), np.uint8)


def split(images: np.ndarray, pixels: np.ndarray) -> dict[bytes, bytes]:
    """The pixels by digest, from joined()."""
    found, start = {}, 0
    for digest, span in different(images).items():
        found[digest] = pixels[start : start + span.num_bytes].tobytes()
        start += span.num_bytes
    return found


def write_files(rollouts: Path, rank: int, images: np.ndarray, pictures: Mapping[bytes, bytes]) -> None:
    """Write a PNG for each different image that the folder rollouts/ of a run does not have. Other ranks may write the
    same image."""
    for digest, span in different(images).items():
        path = picture_path(rollouts, digest)
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        Image.frombytes("RGB", (span.width, span.height), pictures[digest]).save(content, "PNG", compress_level=1)
        write_durably(path, content.getvalue(), writer=str(rank))


def read_files(rollouts: Path, spans: Iterable[ImageSpan]) -> dict[bytes, bytes]:
    """The pixels of images by digest. ValueError if a file is missing or damaged."""
    found: dict[bytes, bytes] = {}
    for span in spans:
        path = picture_path(rollouts, span.digest)
        try:
            with Image.open(path, formats=["PNG"]) as image:
                found[span.digest] = image.convert("RGB").tobytes()
        except (OSError, SyntaxError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if len(found[span.digest]) != span.num_bytes:
            raise ValueError(f"{path} is not the image of {span.width} x {span.height} pixels that it was")
    return found


def picture_path(rollouts: Path, digest: bytes) -> Path:
    """The file of an image."""
    name = digest.hex()
    return rollouts / FOLDER / name[:2] / f"{name}.png"
