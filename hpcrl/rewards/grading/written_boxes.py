"""Boxes and points in a response's text, in the forms that vision-language models write."""

from __future__ import annotations

import re

from hpcrl.rewards.grading.extract import CODE_BLOCK, after_thinking, boxed_answer, tagged_answer

Shape = tuple[float, ...]
"""A box x1, y1, x2, y2, or a point x, y."""

_NUMBER = re.compile(r"[-+]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][-+]?[0-9]++)?")
# Possessive quantifiers avoid quadratic time in the length of a number and of white space.
_N = rf"\s*+{_NUMBER.pattern}\s*+"
_TWO, _FOUR = ",".join([_N] * 2), ",".join([_N] * 4)
_GAP = r"(?:,|(?<=\s))"
_TWO_BARE, _FOUR_BARE = _GAP.join([_N] * 2), _GAP.join([_N] * 4)
_SHAPE = re.compile(
    rf"\[{_FOUR}\]|\({_FOUR}\)"
    rf"|\({_TWO}\)\s*+,\s*+\({_TWO}\)"  # Qwen2-VL: (x1,y1),(x2,y2), maybe between <|box_start|> and <|box_end|>
    rf"|<box>{_FOUR_BARE}</box>"
    rf"|\[{_TWO}\]|\({_TWO}\)"
)
_BARE = re.compile(rf"{_FOUR_BARE}|{_TWO_BARE}")


def written_shapes(response: str, most: int, points: bool = False) -> list[Shape]:
    """The different boxes of a response, with `points` also its points, in order; only the first `most` + 1 if there
    are more.

    All in the first of these that exists after the thinking count: the last `<answer>` tag, the last `\\boxed{}`, the
    last code block, the whole text. A shape is [x1, y1, x2, y2] with any brackets, such as the value of "bbox_2d",
    (x1,y1),(x2,y2), the content of a `<box>` tag, or a point [x, y]; numbers without brackets only if they are all that
    the place contains.
    """
    text = _place(response)
    written = [text] if _BARE.fullmatch(text) else (match[0] for match in _SHAPE.finditer(text))
    shapes: dict[Shape, None] = {}
    for one in written:
        shape = tuple(map(float, _NUMBER.findall(one)))
        if points or len(shape) == 4:
            shapes.setdefault(shape)
        if len(shapes) > most:
            break
    return list(shapes)


def _place(response: str) -> str:
    text = after_thinking(response)
    for content in (tagged_answer(text), boxed_answer(text)):
        if content is not None:
            return content
    blocks = CODE_BLOCK.findall(text)
    return blocks[-1][1] if blocks else text
