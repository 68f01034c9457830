"""Pictures of samples as data URLs in a page: small copies of the run's PNG files, within a budget of bytes."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from hpcrl.report.run_files import RunFiles
from hpcrl.system.files import open_regular

MAX_SIDE, MIN_SIDE = 256, 112
"""A copy's longer side in pixels; smaller pictures are enlarged by a whole factor to about MIN_SIDE."""


class PagePictures:
    """The pictures that a page shows, once each."""

    def __init__(self, run: RunFiles, budget: int):
        self._run, self._left = run, budget
        self.urls: dict[str, str] = {}
        self.left_out: set[str] = set()
        """Pictures that do not fit, or cannot be read."""

    def add(self, digest: str) -> None:
        """Add a picture of the rollouts, by the hex digits of its digest."""
        self.add_file(digest, f"rollouts/pictures/{digest[:2]}/{digest}.png")

    def add_file(self, name: str, file: str, max_side: int = MAX_SIDE) -> None:
        """Add a file of the run under a name. A file that is missing or damaged, or does not fit, is left out."""
        if name in self.urls or name in self.left_out:
            return
        path = self._run.file(file)
        url = "" if path is None else _small(path, max_side)
        if not url or len(url) > self._left:
            self.left_out.add(name)
            return
        self._left -= len(url)
        self.urls[name] = url


def _small(path: Path, max_side: int) -> str:
    """A data URL of a copy of the file; empty if it cannot be read."""
    from PIL import Image

    try:
        with open_regular(path) as file, Image.open(file, formats=["PNG"]) as opened:
            image = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return ""
    if max(image.size) > max_side:
        image.thumbnail((max_side, max_side))
    elif (factor := MIN_SIDE // max(image.size)) > 1:
        image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    choices = []
    for kind, options in (("PNG", {"optimize": True}), ("JPEG", {"quality": 80})):
        data = io.BytesIO()
        image.save(data, kind, **options)
        choices.append((len(data.getvalue()), kind.lower(), data.getvalue()))
    _, kind, content = min(choices)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
