"""What hpcrl knows of a model's images: their sizes, their numbers of tokens, and their tokens' positions.

Vision describes the families whose processor keeps an image's ratio of sides, such as Qwen-VL; other families subclass
it in their own files. A family's field `vision` reads one (hpcrl.models.family).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

from hpcrl.spec.media import Medium

MAX_RATIO = 200
"""Limit of an image's longer side divided by its shorter one, as in the processors of Qwen-VL models."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Filters for resizing, with the numbers of PIL and of the key `resample`."""
BothWays = Literal["none", "all", "windows"]
"""Layers: none, all, or layers with a sliding window."""
PROCESSOR = "the image processor"
"""preprocessor_config.json, or image_processor of processor_config.json, in errors."""
OF_ONE_MODEL = frozenset({"mean", "std", "resample", "both_ways"})
"""Fields of Vision that change no token: what a model makes of pixels, and the filter of their resizing."""
Form = Literal["patches", "squares", "listed squares", "tiles", "padded patches"]
"""What a vision tower reads (hpcrl.engines.patches)."""


class Tile(NamedTuple):
    """What becomes one image of the model's: a picture that was resized to these sizes (width, height), one after the
    other, and of this a box (left, upper, right, lower), or None for all of it.

    Args:
        row: Of a part of a picture, from 1; 0 for a whole picture.
        column: Likewise.
    """

    sizes: tuple[tuple[int, int], ...]
    box: tuple[int, int, int, int] | None = None
    row: int = 0
    column: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the image."""
        if self.box is None:
            return self.sizes[-1]
        left, upper, right, lower = self.box
        return right - left, lower - upper


@dataclass(frozen=True)
class Vision:
    """The image sizes of a model, from its config.json and preprocessor_config.json.

    Args:
        patch: Side of a square patch, pixels.
        merge: Side of the square of patches that become one token.
        min_pixels: Smaller images are enlarged.
        max_pixels: Larger images are shrunk.
        image_token_id: The placeholder token, of which an image gets one per token.
        frames: Number of equal frames that represent a still image.
        mean: Subtracted from the channels of pixels between 0 and 1.
        std: Divisors of the channels after that.
        resample: The filter for resizing.
        both_ways: The layers in which an image's tokens attend to each other in both directions.
    """

    form: ClassVar[Form] = "patches"
    mrope: ClassVar[bool] = True
    """Whether tokens have three positions (see positions()); otherwise they have their index."""
    placeholder: ClassVar[str] = ""
    """What the chat template writes for a picture, if written() replaces it; empty if it writes one image token."""
    towers: ClassVar[tuple[str, ...]] = ("model.visual.",)
    """How the names of the tower's and the merger's parameters begin, in transformers' model."""

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    image_token_id: int = 151655
    frames: int = 2
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    resample: int = BICUBIC
    both_ways: BothWays = "none"

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Equal for models that can read each other's images and tokens."""
        return self.form, self.patch, self.merge, self.frames, self.image_token_id

    def unlike(self, other: Vision, max_pixels: int | None) -> list[str]:
        """Names of the values by which a model with equal `sizes` would show pictures in other sizes, so with other
        numbers of tokens, if both have the limit max_pixels (data.max_pixels)."""
        with contextlib.suppress(ValueError):  # its smallest image is larger, so min_pixels differs
            other = other if max_pixels is None else other.limited(max_pixels)
        names = [field.name for field in fields(self) if field.name not in OF_ONE_MODEL]
        return [name for name in names if getattr(self, name) != getattr(other, name, None)]

    @property
    def least(self) -> tuple[int, int]:
        """Width and height of the smallest image that the tower reads."""
        return self.patch * self.merge, self.patch * self.merge

    @property
    def max_tokens(self) -> int:
        """An upper limit of an image's tokens."""
        return self.max_pixels // (self.patch * self.merge) ** 2

    def tiles(self, width: int, height: int) -> tuple[Tile, ...]:
        """The images that the model sees for a picture of this size. The last one shows the whole picture. ValueError
        as in fit()."""
        return (Tile((self.fit(width, height),)),)

    def written(self, tiles: Sequence[Medium]) -> str:
        """The text that replaces a picture's placeholder, with one image token per tile."""
        raise NotImplementedError

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """The size to which the image is resized: multiples of patch x merge, with about the image's ratio of sides.
        ValueError for a ratio above MAX_RATIO. Equal to `smart_resize` of Qwen2-VL's processor in transformers."""
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ValueError(f"{width} x {height} pixels; the longer side may be {MAX_RATIO} times the shorter one")
        unit = self.patch * self.merge
        sides = [round(side / unit) * unit for side in (width, height)]
        if math.prod(sides) > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            sides = [max(unit, math.floor(side / scale / unit) * unit) for side in (width, height)]
        elif math.prod(sides) < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            sides = [math.ceil(side * scale / unit) * unit for side in (width, height)]
        return sides[0], sides[1]

    def limited(self, max_pixels: int) -> Vision:
        """The same with a lower maximum of pixels. ValueError if the minimum is higher."""
        least = max(self.min_pixels, (self.patch * self.merge) ** 2)
        if max_pixels < least:
            raise ValueError(f"data.max_pixels: {max_pixels}, but the model's smallest image has {least} pixels")
        return replace(self, max_pixels=min(self.max_pixels, max_pixels))

    def num_patches(self, width: int, height: int) -> int:
        """Patches of an image of a size from fit()."""
        return (width // self.patch) * (height // self.patch)

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens of an image of a size from fit()."""
        return self.num_patches(width, height) // self.merge**2


TINY = Vision(patch=14, merge=2, min_pixels=28 * 28, max_pixels=28 * 28 * 64)
"""Image sizes of a model from hpcrl.engines.tiny."""


def read_vision(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Image properties of a model whose images keep their ratio of sides. `processor` is the content of
    preprocessor_config.json. ValueError names a key without a usable value."""
    tower = config.get("vision_config") or {}
    patch = number(processor, tower, "patch_size", default=14)
    merge = number(processor, {"merge_size": tower.get("spatial_merge_size")}, "merge_size", default=2)
    frames = number(tower, processor, "temporal_patch_size", default=2)
    limits = sides_of(processor)
    least = number(processor, {"min_pixels": limits.get("shortest_edge")}, "min_pixels", default=56 * 56)
    most = number(processor, {"max_pixels": limits.get("longest_edge")}, "max_pixels", default=28 * 28 * 1280)
    token = number(config, {}, "image_token_id", default=Vision.image_token_id, least=0)
    _check_processor(processor, tower)
    if not (patch * merge) ** 2 <= most or least > most:
        raise ValueError(f"min_pixels={least} and max_pixels={most} of {PROCESSOR} allow no image")
    mean, std = colours(processor, "image_mean", CLIP_MEAN), colours(processor, "image_std", CLIP_STD)
    return Vision(patch, merge, least, most, token, frames, mean, std, filter_of(processor, BICUBIC))


def _check_processor(processor: Mapping[str, Any], tower: Mapping[str, Any]) -> None:
    """ValueError for an image processor whose patches are not the tower's, or whose steps are other ones."""
    for key, own in (("patch_size", tower.get("patch_size")), ("merge_size", tower.get("spatial_merge_size"))):
        if own is not None and processor.get(key, own) != own:
            raise ValueError(f"{key}={processor[key]} of {PROCESSOR}, but {own} in vision_config of config.json")
    if other := sorted({"height", "width"}.intersection(sides_of(processor))):
        raise ValueError(
            f"size of {PROCESSOR} has {', '.join(other)}, of another family than shortest_edge, longest_edge"
        )
    if off := [key for key in ("do_resize", "do_rescale", "do_normalize") if processor.get(key) is False]:
        raise ValueError(f"{off[0]}=false of {PROCESSOR} is not supported")


def sides_of(processor: Mapping[str, Any], key: str = "size") -> Mapping[str, Any]:
    """A key of the image processor with named sides in pixels; empty if absent. ValueError for another value."""
    sides = processor.get(key) or {}
    if not isinstance(sides, Mapping):
        raise ValueError(f"{key} of {PROCESSOR} is {sides!r}, without the names of its sides")
    return sides


def number(first: Mapping[str, Any], second: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    """A key's value in the first section, else in the second, else the default. ValueError if it is below `least`."""
    value = next((found for found in (first.get(key), second.get(key)) if found is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key} is {value!r}, not a positive number")
    return value


def colours(processor: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """A value for each channel. ValueError for other values, and for a standard deviation that is not above 0."""
    values = processor.get(key) or default
    usable = isinstance(values, list | tuple) and len(values) == 3
    usable = usable and all(isinstance(value, int | float) and (value > 0 or key != "image_std") for value in values)
    if not usable:
        wanted = "three numbers above 0" if key == "image_std" else "three numbers"
        raise ValueError(f"{key} of {PROCESSOR} is {values!r}, not {wanted}")
    return tuple(map(float, values))


def filter_of(processor: Mapping[str, Any], default: int) -> int:
    """The filter for resizing."""
    return default if processor.get("resample") is None else int(processor["resample"])
