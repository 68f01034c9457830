"""HTML pages of a run folder: texts of models, which are hostile, and pictures, in one file without scripts."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcrl.rollout.pictures import thumbnail
from hpcrl.spec.media import Medium

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_SIDE = 112
"""A page's copy of a smaller image is enlarged by a whole factor, to about this many pixels."""
PAGE = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<style>body {{ font: 15px sans-serif; max-width: 60em; margin: 2em auto }}
div {{ margin: .6em 0; padding: .6em; border-radius: 6px; background: #eef1f5 }} div.assistant {{ background: #e3f2e1 }}
td, th {{ text-align: left; vertical-align: top; padding: .1em 1em .1em 0 }}
pre {{ margin: .3em 0; white-space: pre-wrap }}
img {{ margin: .2em .4em .2em 0; image-rendering: pixelated }}</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
"""


def page(title: str, body: Sequence[str]) -> bytes:
    """A page of these elements, in which texts are escaped already."""
    return PAGE.format(title=html.escape(title), body="\n".join(body)).encode(errors="replace")


def tag(image: Image, alternative: str) -> str:
    """An element with the image."""
    data = base64.b64encode(encoded(image)).decode()
    return f'<img alt="{html.escape(alternative)}" src="data:image/png;base64,{data}">'


def encoded(image: Image) -> bytes:
    """The image as a PNG file."""
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def small(medium: Medium) -> Image:
    """An image of a prompt or observation in a size for pages."""
    from PIL import Image

    image = Image.fromarray(thumbnail(medium).pixels)
    if (factor := MIN_SIDE // max(image.size)) > 1:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    return image
