"""Finds rows whose images a run could not use, from the heads of their files, and counts the images' tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpcrl.data.media import ImageFile
from hpcrl.data.pictures import size_of
from hpcrl.data.rows import ChecksRows, Row
from hpcrl.data.template_forms import shows_images
from hpcrl.data.templates import FolderTemplate
from hpcrl.models.vision import Vision
from hpcrl.spec.media import IMAGE, MAX_PIXEL_BYTES, WRITTEN_MARK, Medium

REMEDY = "raise the limit, lower data.max_pixels, or leave the row out (data.overlong_prompts=drop)"


def without_pixels(images: Sequence[ImageFile], vision: Vision) -> list[Medium]:
    """The images as the model sees them, without content, from the heads of their files. ValueError for an image that
    cannot be used, OSError for one that cannot be read."""
    found = []
    for image in images:
        for tile in vision.tiles(*size_of(image.content if image.content is not None else image.path)):
            width, height = tile.size
            length = vision.num_tokens(width, height)
            found.append(Medium(IMAGE, b"", width, height, length=length, row=tile.row, column=tile.column))
    return found


class ImageCheck:
    """Checks images' sizes, and what another check finds in a row. After the scan, `most_tokens` has the tokens of a
    row's images at most, and `bare_marks` the number of rows that have `<image>` in a user's text but no image, and the
    place of the first. `judged` maps a domain to the tokens that a row's images have for the judge at most, and the
    place of this row.

    Args:
        max_tokens: Maximum tokens of a row's images; None: unlimited.
        limited_by: Key of this limit.
        template: The model's chat template, if it has one.
        drops: Whether the run drops rows above the limit, as it does with longer texts.
        other: Applied first.
        judge: The image properties of the run's own judge, which gets the pictures in the model's size.
    """

    def __init__(
        self,
        vision: Vision,
        max_tokens: int | None,
        limited_by: str,
        template: FolderTemplate | None,
        drops: bool,
        other: ChecksRows | None = None,
        judge: Vision | None = None,
    ):
        self._blind = template is not None and bool(template.chat_template) and not shows_images(template)
        self._vision, self._limited_by, self._drops, self._other = vision, limited_by, drops, other
        self._judge = judge
        self._max_tokens = math.inf if max_tokens is None else max_tokens
        self.most_tokens = 0
        self.bare_marks = 0, ""
        self.judged: dict[str, tuple[int, str]] = {}

    def problem_of(self, row: Row, where: str) -> str:
        """Why a row's images cannot be used, in one line; empty if they can."""
        if row.images and self._blind:
            return f"{where}: the row has images, for which the model's chat template writes nothing"
        if not row.images and any(
            WRITTEN_MARK in (said["content"] or "") for said in row.messages if said["role"] == "user"
        ):
            count, first = self.bare_marks
            self.bare_marks = count + 1, first or where
        found = self._other.problem_of(row, where) if self._other is not None else ""
        return found or self._too_large(row.images, row.domain, where)

    def _too_large(self, images: Sequence[ImageFile], domain: str, where: str) -> str:
        total, num_bytes, judged = 0, 0, 0
        for image in images:
            try:
                own = size_of(image.content if image.content is not None else image.path)
                tiles = [tile.size for tile in self._vision.tiles(*own)]
            except ValueError as error:
                return f"{image.place}: {error}"
            except OSError as error:
                return f"{image.place}: {image.path} cannot be read: {error.strerror or error}"
            tokens = sum(self._vision.num_tokens(*size) for size in tiles)
            if tokens > self._max_tokens and not self._drops:
                size = f"the image of {own[0]} x {own[1]} pixels has {tokens} tokens"
                return f"{image.place}: {size}, more than {self._limited_by}={self._max_tokens}; {REMEDY}"
            judged += self._judged_tokens(tiles[-1])
            total, num_bytes = total + tokens, num_bytes + sum(3 * width * height for width, height in tiles)
        if total > self._max_tokens:
            if self._drops:
                return ""
            size = f"the row's {len(images)} images have {total} tokens"
            return f"{where}: {size}, more than {self._limited_by}={self._max_tokens}; {REMEDY}"
        if num_bytes > MAX_PIXEL_BYTES:
            size = f"the row's {len(images)} images have more than {MAX_PIXEL_BYTES >> 20} MiB of pixels"
            return f"{where}: {size}, which are sent with the prompt; lower data.max_pixels, or leave the row out"
        self.most_tokens = max(self.most_tokens, total)
        if judged > self.judged.get(domain, (0, ""))[0]:
            self.judged[domain] = judged, where
        return ""

    def _judged_tokens(self, size: tuple[int, int]) -> int:
        """Tokens of a picture of this size for the judge; 0 if there is none, or if it refuses the ratio of sides."""
        if self._judge is None:
            return 0
        try:
            return sum(self._judge.num_tokens(*tile.size) for tile in self._judge.tiles(*size))
        except ValueError:
            return 0
