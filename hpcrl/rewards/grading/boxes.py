"""Boxes in pictures: [x1, y1, x2, y2] with the corners top left and bottom right, and how far two of them agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.rewards.grading.extract import json_of
from hpcrl.rewards.grading.written_boxes import written_shapes

Box = tuple[float, float, float, float]

MAX_BOXES = 100
"""Maximum number of boxes in an answer or a response, as in COCO's evaluation."""
MAX_COORDINATE = 1e9
"""A box beyond this is invalid; products of larger coordinates could overflow."""
KEYS = ("bbox_2d", "bbox", "box")
"""Keys of a box in an answer's objects."""


def is_box(shape: Sequence[float]) -> bool:
    """Whether a shape is a box with an area and finite corners."""
    return len(shape) == 4 and shape[0] < shape[2] and shape[1] < shape[3] and all(map(_is_near, shape))


def _is_near(value: float) -> bool:
    return abs(value) <= MAX_COORDINATE


def iou(one: Box, other: Box) -> float:
    """Intersection over union, from 0 to 1."""
    shared = _shared(one, other)
    return shared / (_area(one) + _area(other) - shared)


def giou(one: Box, other: Box) -> float:
    """Generalised IoU (arXiv 1902.09630), from -1 to 1: the IoU minus the share of the smallest box around both that
    neither covers."""
    union = _area(one) + _area(other) - _shared(one, other)
    around = (max(one[2], other[2]) - min(one[0], other[0])) * (max(one[3], other[3]) - min(one[1], other[1]))
    return iou(one, other) - (around - union) / around


def holds(box: Box, x: float, y: float) -> bool:
    """Whether a point lies in a box or on its edge."""
    return box[0] <= x <= box[2] and box[1] <= y <= box[3]


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _shared(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


def boxes_of(answer: Any) -> list[Box]:
    """The boxes of a row's answer, each once: a box, an object with one of KEYS, or a list of both; as values, JSON
    text, or in a response's forms. ValueError describes the problem."""
    value = json_of(answer)
    if isinstance(answer, str) and value is None:
        found: Sequence[Any] = written_shapes(answer, MAX_BOXES)
    else:
        found = value if isinstance(value, list | tuple) and not _is_four(value) else [value]
    if not found:
        raise ValueError(f"the answer {_told(answer)} has no box [x1, y1, x2, y2]")
    if len(found) > MAX_BOXES:
        raise ValueError(f"the answer has more than {MAX_BOXES} boxes")
    return list(dict.fromkeys(map(_box, found)))


def _box(found: Any) -> Box:
    if isinstance(found, Mapping):
        found = next((found[key] for key in KEYS if key in found), found)
    if not _is_four(found):
        raise ValueError(f"{_told(found)} in the answer is not a box [x1, y1, x2, y2], nor an object with bbox_2d")
    if not all(_is_near(value) for value in found) or not is_box(box := tuple(map(float, found))):
        raise ValueError(
            f"the box {_told(found)} in the answer has no area: [x1, y1, x2, y2] needs x1 < x2 and y1 < y2"
        )
    return box  # type: ignore[return-value]


def _is_four(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 4 and all(map(is_number, value))


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _told(value: Any) -> str:
    return repr(value if isinstance(value, str) else str(value))[:60]
