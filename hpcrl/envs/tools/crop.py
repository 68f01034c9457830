"""The tool crop: a region of an image of the prompt, enlarged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from hpcrl.data.media import images_of, read_parts
from hpcrl.data.pictures import decode
from hpcrl.envs.tools.spec import ToolOptions
from hpcrl.envs.tools.tool import Result, schema
from hpcrl.models.vision import Vision

MAX_LABEL_CHARS = 80


@dataclass(frozen=True)
class _Seen:
    """An image in its own size, and the size in which the model sees it."""

    image: Image.Image
    width: int
    height: int


class CropTool:
    """Cuts a region out of an image and enlarges it by options.crop_zoom. Coordinates are pixels of the image as the
    model sees it, after its resizing (hpcrl.models.vision), while the region is cut out of the image in its own size.
    Earlier crops of the episode can be cropped, too."""

    schema = schema(
        "crop",
        "Cut a region out of an image and show it enlarged.",
        optional=("image", "label"),
        bbox={
            "type": "array",
            "items": {"type": "number"},
            "minItems": 4,
            "maxItems": 4,
            "description": "The region as [x1, y1, x2, y2], in pixels from the upper left corner of the image.",
        },
        image={"type": "integer", "description": "Number of the image, 1 for the first (the default)."},
        label={"type": "string", "description": "What the region shows."},
    )

    def __init__(self, options: ToolOptions, images: Sequence[Any] = ()):
        """`images` are the row's: paths, data URLs, bytes, or objects with bytes or path."""
        self._given, self._zoom = images, options.crop_zoom
        self._vision = Vision(options.crop_unit, 1, options.crop_min_pixels, options.crop_max_pixels)
        self._seen: list[_Seen] = []

    def begin(self, seed: int) -> None:
        """Decode the row's images. ValueError names one that cannot be read."""
        parts = images_of(list(self._given), "images", "the row")
        self._seen = []
        for image in read_parts(parts, Path()):
            try:
                self._seen.append(self._as_seen(decode(image.read())))
            except (OSError, ValueError) as error:
                raise ValueError(f"{image.place}: {error}") from error

    def call(self, arguments: dict[str, Any], timeout_s: float) -> Result:
        """The enlarged region; a region beyond the image is clipped."""
        number = arguments.get("image", 1)
        if not 1 <= number <= len(self._seen):
            return Result(f"there is no image {number}; there are {len(self._seen)}, numbered from 1", error=True)
        seen, (left, upper, right, lower) = self._seen[number - 1], arguments["bbox"]
        left, right = (min(max(x, 0), seen.width) for x in (left, right))
        upper, lower = (min(max(y, 0), seen.height) for y in (upper, lower))
        if left >= right or upper >= lower:
            size = f"image {number} has {seen.width} x {seen.height} pixels"
            return Result(f"the box is empty: x1 < x2 and y1 < y2 must hold, and {size}", error=True)
        try:
            width, height = self._enlarged(right - left, lower - upper)
        except ValueError as error:
            return Result(f"the box is too narrow: {error}", error=True)
        across, down = seen.image.width / seen.width, seen.image.height / seen.height
        box = math.floor(left * across), math.floor(upper * down), math.ceil(right * across), math.ceil(lower * down)
        crop = seen.image.crop(box).resize((width, height), Image.Resampling.BICUBIC)
        self._seen.append(_Seen(crop, width, height))
        label = arguments.get("label", "")[:MAX_LABEL_CHARS]
        shown = f"({left:g}, {upper:g}) to ({right:g}, {lower:g}) of image {number}"
        text = f"Image {len(self._seen)}, {width} x {height} pixels: {shown}{f', {label}' if label else ''}."
        return Result(text, images=(crop,))

    def _as_seen(self, image: Image.Image) -> _Seen:
        return _Seen(image, *self._vision.fit(image.width, image.height))

    def _enlarged(self, width: float, height: float) -> tuple[int, int]:
        """The size of a crop, which needs no further resizing. ValueError as in Vision.fit()."""
        return self._vision.fit(*(max(1, round(side * self._zoom)) for side in (width, height)))
