"""Write episodes for inspection: as text and as an HTML page; for grid worlds also as a row of pictures and a GIF."""

from __future__ import annotations

import base64
import colorsys
import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.system.files import write_durably

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_ROWS, MAX_ROWS, MIN_COLUMNS, MAX_COLUMNS = 2, 64, 2, 64
"""Minimum and maximum size of a text block that counts as a grid."""
MAX_PICTURES = 64
"""Maximum number of an episode's states that are drawn: image formats are limited to 65535 pixels."""
TILE, MARGIN = 28, 8
"""Pixels per cell and between pictures."""
MAX_CAPTION_CHARS = 34
FRAME_MS = 700
GROUND, WALL = "_.", "#W"
"""Characters drawn as light cells, and as dark cells; every other character gets its own colour."""
PAGE = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<style>body {{ font: 15px sans-serif; max-width: 60em; margin: 2em auto }}
div {{ margin: .6em 0; padding: .6em; border-radius: 6px; background: #eef1f5 }} div.assistant {{ background: #e3f2e1 }}
pre {{ margin: .3em 0; white-space: pre-wrap }} img {{ display: block }}</style></head>
<body><h1>{title}</h1>
{messages}
</body></html>
"""


@dataclass(frozen=True)
class Episode:
    """A finished episode: chat messages, rewards per turn, total reward and score."""

    messages: Sequence[Mapping[str, Any]]
    turn_rewards: Sequence[float]
    reward: float
    score: float
    error: str = ""

    @property
    def title(self) -> str:
        """A one-line summary."""
        told = f"score {self.score:.4g}, reward {self.reward:.4g}, {len(self.turn_rewards)} turns"
        return f"{told}, error: {self.error}" if self.error else told


def write_episode(folder: Path, name: str, episode: Episode) -> list[Path]:
    """Write NAME.txt and NAME.html, and, if at least two messages show a grid, NAME.png and NAME.gif; return the paths.
    OSError if a file cannot be written."""
    spoken = list(_spoken(episode))
    pictures = _pictures(spoken)
    files = {"txt": _text(episode, spoken), "html": _page(episode, spoken, pictures)}
    if len(pictures) > 1:
        files |= {"png": _encoded(_row(list(pictures.values()))), "gif": _film(list(pictures.values()))}
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for ending, data in files.items():
        paths.append(folder / f"{name}.{ending}")
        write_durably(paths[-1], data)
    return paths


def grid_of(text: str) -> list[str]:
    """The last grid in a text: lines of equal length without blanks; empty if there is none."""
    found: list[str] = []
    block: list[str] = []
    for line in [*text.split("\n"), ""]:
        fits = MIN_COLUMNS <= len(line) <= MAX_COLUMNS and line.isprintable() and " " not in line
        if fits and (not block or len(line) == len(block[0])):
            block.append(line)
            continue
        found = block if MIN_ROWS <= len(block) <= MAX_ROWS else found
        block = [line] if fits else []
    return found


@dataclass(frozen=True)
class _Spoken:
    """A message with its role; for a model turn, also its number and reward."""

    role: str
    text: str
    turn: int = 0
    reward: float = 0.0

    @property
    def head(self) -> str:
        return f"{self.role}, turn {self.turn}, reward {self.reward:.4g}" if self.turn else self.role


def _spoken(episode: Episode) -> Iterator[_Spoken]:
    """The messages. The last assistant messages are the turns; earlier assistant messages belong to the prompt."""
    roles = [str(message.get("role", "")) for message in episode.messages]
    turn = len(episode.turn_rewards) - roles.count("assistant")
    for role, message in zip(roles, episode.messages, strict=True):
        content = message.get("content", "")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        turn += role == "assistant"
        if role == "assistant" and turn > 0:
            yield _Spoken(role, text, turn, episode.turn_rewards[turn - 1])
        else:
            yield _Spoken(role, text)


def _text(episode: Episode, spoken: Sequence[_Spoken]) -> bytes:
    parts = [episode.title, *(f"[{one.head}]\n{one.text}" for one in spoken)]
    return ("\n\n".join(parts) + "\n").encode(errors="replace")


def _page(episode: Episode, spoken: Sequence[_Spoken], pictures: Mapping[int, Image]) -> bytes:
    messages = []
    for number, one in enumerate(spoken):
        kind = "assistant" if one.role == "assistant" else "other"
        shown = f"<b>{html.escape(one.head)}</b><pre>{html.escape(one.text)}</pre>"
        if number in pictures:
            data = base64.b64encode(_encoded(pictures[number])).decode()
            shown += f'<img alt="the grid" src="data:image/png;base64,{data}">'
        messages.append(f'<div class="{kind}">{shown}</div>')
    return PAGE.format(title=html.escape(episode.title), messages="\n".join(messages)).encode(errors="replace")


def _pictures(spoken: Sequence[_Spoken]) -> dict[int, Image]:
    """Index of each environment message that shows a grid -> its picture, all of equal size. Examples in the prompt,
    which end with an assistant message, are other games and get no pictures."""
    shown = [number for number, one in enumerate(spoken) if one.role == "assistant" and not one.turn]
    begins = shown[-1] + 1 if shown else 0
    told = ((number, one) for number, one in enumerate(spoken) if number >= begins and one.role != "assistant")
    grids = {number: grid for number, one in told if (grid := grid_of(one.text))}
    if not grids:
        return {}
    grids = dict(islice(grids.items(), MAX_PICTURES))
    size = max(len(grid[0]) for grid in grids.values()), max(len(grid) for grid in grids.values())
    captions = {number: _caption(spoken[:number]) for number in grids}
    return {number: _drawn(grid, captions[number], size) for number, grid in grids.items()}


def _caption(before: Sequence[_Spoken]) -> str:
    """A caption with the turn that led to a state."""
    turns = [one for one in before if one.turn]
    if not turns:
        return "start"
    text = " ".join(turns[-1].text.split())
    cut = text if len(text) <= MAX_CAPTION_CHARS else "..." + text[-MAX_CAPTION_CHARS:]
    return f"{turns[-1].turn}: {cut} ({turns[-1].reward:.3g})"


def _drawn(grid: Sequence[str], caption: str, size: tuple[int, int]) -> Image:
    """Draw a grid. `size` is the largest grid's number of columns and rows."""
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont

    fonts = Path(get_data_path()) / "fonts" / "ttf"
    letters = ImageFont.truetype(str(fonts / "DejaVuSansMono.ttf"), TILE // 2)
    small = ImageFont.truetype(str(fonts / "DejaVuSansMono.ttf"), 11)
    width = max(size[0] * TILE, 7 * (MAX_CAPTION_CHARS + 14))
    picture = Image.new("RGB", (width, size[1] * TILE + 2 * MARGIN + 11), "white")
    draw = ImageDraw.Draw(picture)
    for row, line in enumerate(grid):
        for column, character in enumerate(line):
            left, top = column * TILE, row * TILE
            draw.rectangle((left, top, left + TILE - 2, top + TILE - 2), fill=_colour(character))
            draw.text((left + TILE // 2, top + TILE // 2), character, fill="black", font=letters, anchor="mm")
    draw.text((0, size[1] * TILE + MARGIN), caption, fill="black", font=small)
    return picture


def _colour(character: str) -> tuple[int, int, int]:
    if character in GROUND:
        return 226, 236, 245
    if character in WALL:
        return 110, 110, 120
    red, green, blue = colorsys.hsv_to_rgb(ord(character) * 0.618 % 1.0, 0.4, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def _row(pictures: Sequence[Image]) -> Image:
    from PIL import Image

    width, height = pictures[0].size
    row = Image.new("RGB", (len(pictures) * (width + MARGIN), height), "white")
    for number, picture in enumerate(pictures):
        row.paste(picture, (number * (width + MARGIN), 0))
    return row


def _film(pictures: Sequence[Image]) -> bytes:
    data = io.BytesIO()
    rest = list(pictures[1:])
    pictures[0].save(data, "GIF", save_all=True, append_images=rest, duration=FRAME_MS, loop=0)
    return data.getvalue()


def _encoded(picture: Image) -> bytes:
    data = io.BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()
