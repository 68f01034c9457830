"""Write episodes for inspection: as text and as an HTML page; for episodes with images or text grids also as a row of
pictures and a GIF."""

from __future__ import annotations

import colorsys
import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.controller.pages import encoded, page, small, tag
from hpcrl.spec.media import WRITTEN_MARK, Medium
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


@dataclass(frozen=True)
class Episode:
    """A finished episode: chat messages, rewards per turn, total reward, score, and images in the order of their
    `<image>` marks; the same for the observation after the last turn, which is not in the sample."""

    messages: Sequence[Mapping[str, Any]]
    turn_rewards: Sequence[float]
    reward: float
    score: float
    error: str = ""
    media: Sequence[Medium] = ()
    last: Sequence[Mapping[str, Any]] = ()
    last_media: Sequence[Medium] = ()

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
        files |= {"png": encoded(_row(list(pictures.values()))), "gif": _film(list(pictures.values()))}
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
    media: Sequence[Medium] = ()

    @property
    def head(self) -> str:
        return f"{self.role}, turn {self.turn}, reward {self.reward:.4g}" if self.turn else self.role


def _spoken(episode: Episode) -> Iterator[_Spoken]:
    """The messages. The last assistant messages are the turns; earlier assistant messages belong to the prompt."""
    whole = [*episode.messages, *episode.last]
    roles = [str(message.get("role", "")) for message in whole]
    turn = len(episode.turn_rewards) - roles.count("assistant")
    following, last = iter(episode.media), iter(episode.last_media)
    for number, (role, message) in enumerate(zip(roles, whole, strict=True)):
        content = message.get("content", "")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        turn += role == "assistant"
        if role == "assistant" and turn > 0:
            yield _Spoken(role, text, turn, episode.turn_rewards[turn - 1])
        else:
            marks = 0 if role == "assistant" else text.count(WRITTEN_MARK)
            yield _Spoken(role, text, media=list(islice(following if number < len(episode.messages) else last, marks)))


def _text(episode: Episode, spoken: Sequence[_Spoken]) -> bytes:
    parts = [episode.title, *(f"[{one.head}]\n{one.text}" for one in spoken)]
    return ("\n\n".join(parts) + "\n").encode(errors="replace")


def _page(episode: Episode, spoken: Sequence[_Spoken], pictures: Mapping[int, Image]) -> bytes:
    messages = []
    for number, one in enumerate(spoken):
        kind = "assistant" if one.role == "assistant" else "other"
        shown = f"<b>{html.escape(one.head)}</b><pre>{html.escape(one.text)}</pre>"
        shown += "".join(f"<br>{tag(small(medium), 'an image')}" for medium in one.media)
        if number in pictures and not one.media:
            shown += tag(pictures[number], "the grid")
        messages.append(f'<div class="{kind}">{shown}</div>')
    return page(episode.title, messages)


def _pictures(spoken: Sequence[_Spoken]) -> dict[int, Image]:
    """Index of each environment message that shows an image or a grid -> its picture, all of equal size. Examples in
    the prompt, which end with an assistant message, are other games and get no pictures."""
    shown = [number for number, one in enumerate(spoken) if one.role == "assistant" and not one.turn]
    begins = shown[-1] + 1 if shown else 0
    told = [(number, one) for number, one in enumerate(spoken) if number >= begins and one.role != "assistant"]
    frames: Iterator[tuple[int, Image]]
    if any(one.media for _, one in told):
        frames = ((number, small(one.media[-1])) for number, one in told if one.media)
    else:
        frames = ((number, _drawn(grid)) for number, one in told if (grid := grid_of(one.text)))
    found = dict(islice(frames, MAX_PICTURES))
    width = max((frame.width for frame in found.values()), default=0)
    height = max((frame.height for frame in found.values()), default=0)
    return {number: _captioned(frame, _caption(spoken[:number]), width, height) for number, frame in found.items()}


def _caption(before: Sequence[_Spoken]) -> str:
    """A caption with the turn that led to a state."""
    turns = [one for one in before if one.turn]
    if not turns:
        return "start"
    text = " ".join(turns[-1].text.split())
    cut = text if len(text) <= MAX_CAPTION_CHARS else "..." + text[-MAX_CAPTION_CHARS:]
    return f"{turns[-1].turn}: {cut} ({turns[-1].reward:.3g})"


def _drawn(grid: Sequence[str]) -> Image:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (len(grid[0]) * TILE, len(grid) * TILE), "white")
    draw, font = ImageDraw.Draw(picture), _font(TILE // 2)
    for row, line in enumerate(grid):
        for column, character in enumerate(line):
            left, top = column * TILE, row * TILE
            draw.rectangle((left, top, left + TILE - 2, top + TILE - 2), fill=_colour(character))
            draw.text((left + TILE // 2, top + TILE // 2), character, fill="black", font=font, anchor="mm")
    return picture


def _captioned(picture: Image, caption: str, width: int, height: int) -> Image:
    """The picture on a larger one of this size, above a caption."""
    from PIL import Image, ImageDraw

    whole = Image.new("RGB", (max(width, 7 * (MAX_CAPTION_CHARS + 14)), height + 2 * MARGIN + 11), "white")
    whole.paste(picture, (0, 0))
    ImageDraw.Draw(whole).text((0, height + MARGIN), caption, fill="black", font=_font(11))
    return whole


def _font(size: int) -> Any:
    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"), size)


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
