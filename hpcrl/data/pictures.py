"""From the bytes of an image file to the pixels that generator and trainer get.

Each image is decoded and resized here, once, since the resizing of PIL and of torchvision differs by more than the
mismatch between a generator's and a trainer's log-probs. The result is upright (EXIF), RGB, on white where the file is
transparent, the first frame of an animation, and 8 bits per channel.
"""

from __future__ import annotations

import contextlib
import io
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from hpcrl.models.vision import Tile, Vision
from hpcrl.spec.media import IMAGE, Medium

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_FILE_PIXELS = 1 << 26
"""Limit for the pixels of a file, 67 million: a file of kilobytes may contain gigabytes."""
TRANSPARENT = {"LA", "La", "PA", "RGBA", "RGBa"}
SIXTEEN_BITS = {"I;16", "I;16B", "I;16L", "I;16N", "I"}
ORIENTATION = 0x0112
"""The EXIF tag of an image's orientation."""
SIDEWAYS = (5, 6, 7, 8)
"""Its values for images whose width and height are exchanged."""
WHITE = (255, 255, 255)


def read_picture(content: bytes, vision: Vision) -> list[Medium]:
    """Decode an image file and make of it what a model sees: one image, or parts and all of it (Vision.tiles). Their
    tokens have no place yet. ValueError states why the model cannot get it."""
    image = decode(content)
    resized: dict[tuple[tuple[int, int], ...], Image.Image] = {(): image}  # a picture's parts have common sizes
    found = []
    for tile in vision.tiles(image.width, image.height):
        for number, size in enumerate(tile.sizes):
            before, now = tile.sizes[:number], tile.sizes[: number + 1]
            if now not in resized:
                resized[now] = _resized(resized[before], size, vision)
        found.append(_shown(resized[tile.sizes], tile, vision))
    return found


def _resized(image: Image.Image, size: tuple[int, int], vision: Vision) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling(vision.resample))


def _shown(image: Image.Image, tile: Tile, vision: Vision) -> Medium:
    if tile.box is not None:
        image = image.crop(tile.box)
    length = vision.num_tokens(image.width, image.height)
    made = Medium(IMAGE, image.tobytes(), image.width, image.height, length=length, row=tile.row, column=tile.column)
    return msgspec.structs.replace(made, sha256=made.digest)


def size_of(file: bytes | Path) -> tuple[int, int]:
    """Width and height of an image, upright, from the head of its file. ValueError states why it cannot be decoded, as
    far as the head shows; OSError if there is no such file."""
    with _reasons():
        image = _opened(file)
        _check_channels(image)
        known = image.format != "PNG" or "exif" in image.info  # else Pillow would decode the file to look for it
        turned = known and image.getexif().get(ORIENTATION) in SIDEWAYS
        return (image.height, image.width) if turned else image.size


def decode(content: bytes) -> Image.Image:
    """The image of a file as RGB, in its own size. ValueError states why it cannot be decoded."""
    with _reasons():
        image = _opened(content)
        image.load()
        return _rgb(ImageOps.exif_transpose(image))


def _opened(file: bytes | Path) -> Image.Image:
    image = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS)
    if image.width * image.height > MAX_FILE_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels, and at most {MAX_FILE_PIXELS} are decoded")
    if not (image.width and image.height):
        raise ValueError(f"{image.width} x {image.height} pixels")
    return image


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    """Make Pillow's errors ValueErrors that a user understands."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow's own limit, and of odd metadata
            yield
    except UnidentifiedImageError:
        text = f"it is damaged, or not an image of a known format ({', '.join(FORMATS)})"
        raise ValueError(text) from None
    except Image.DecompressionBombError:
        raise ValueError(f"it has more pixels than the {MAX_FILE_PIXELS} that are decoded") from None
    except (OSError, SyntaxError, struct.error, EOFError, IndexError, TypeError, OverflowError, MemoryError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(f"it cannot be decoded: {error}") from None  # Pillow's decoders raise all of these


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in SIXTEEN_BITS:
        return _eight_bits(image).convert("RGB")
    _check_channels(image)
    if image.mode in TRANSPARENT or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.new("RGB", layer.size, WHITE)
        image.paste(layer, mask=layer.getchannel("A"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _check_channels(image: Image.Image) -> None:
    if image.mode == "F":
        raise ValueError("its channels are floating-point numbers; store it with 8 or 16 bits per channel")


def _eight_bits(image: Image.Image) -> Image.Image:
    """A greyscale image of 16 bits with its values scaled; Pillow's conversion would cut values above 255."""
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 0xFFFF:
        raise ValueError("its channels have more than 16 bits; store it with 8 or 16 bits per channel")
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
