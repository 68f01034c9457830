"""The grounding reward: compares boxes or points in a response with the boxes of its row's answer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.config import RewardConfig
from hpcrl.rewards.grading.assignment import best_sum
from hpcrl.rewards.grading.boxes import MAX_BOXES, Box, boxes_of, giou, holds, iou, is_box, is_number
from hpcrl.rewards.grading.written_boxes import Shape, written_shapes
from hpcrl.rewards.reward import PerResponse, RewardItem, Score, required_answer
from hpcrl.rewards.spec import GroundingOptions
from hpcrl.spec.options import read_options

RELATIVE = 1000.0
"""Width and height of every picture in relative coordinates."""
USUAL_THRESHOLD = 0.5
"""The score's threshold if the options have none: Acc@0.5 of referring expressions."""


class GroundingReward(PerResponse):
    """2 x (sum over pairs) / (boxes of the answer + boxes of the response).

    Boxes of answer and response form pairs, each box in one at most, with the largest sum. A pair counts its IoU, or
    (GIoU + 1) / 2; with `threshold` 1 or 0, which makes the reward the F1 at the threshold. With measure=point a pair
    counts 1 if the point, or the centre of the response's box, lies in the answer's box. The score is 1 if every box
    has a pair at the threshold.
    """

    def __init__(self, config: RewardConfig):
        self.options = read_options(GroundingOptions, config.options)

    def problem_of_row(self, answer: Any, extra: Mapping[str, Any]) -> str:
        """Reports an answer without boxes, and a row without the picture's size if the size is needed."""
        if answer is None:
            return ""
        try:
            self._gold(answer, extra)
        except ValueError as error:
            return str(error)
        return ""

    def score_one(self, item: RewardItem) -> Score:
        options, gold = self.options, self._gold(required_answer(item), item.extra)
        shapes = written_shapes(item.response, MAX_BOXES, points=options.measure == "point")
        given, wanted = _told(shapes), _told(gold)
        if not shapes or len(shapes) > MAX_BOXES:
            return Score(
                0.0, 0.0, metrics={"no_answer": 1.0, options.measure: 0.0}, extracted=given, ground_truth=wanted
            )
        measured = [[self._measure(shape, box) for shape in shapes] for box in gold]
        least = USUAL_THRESHOLD if options.threshold is None else options.threshold
        hits = best_sum([[float(value >= least) for value in row] for row in measured])
        shares = best_sum([[self._share(value) for value in row] for row in measured])
        counted = hits if options.threshold is not None else shares
        count = len(gold) + len(shapes)
        metrics = {"no_answer": 0.0, options.measure: 2 * shares / count}
        return Score(
            2 * counted / count, float(2 * hits == count), metrics=metrics, extracted=given, ground_truth=wanted
        )

    def _measure(self, shape: Shape, box: Box) -> float:
        """IoU, GIoU, or whether the point is in the box; the lowest value for a box without an area."""
        kind = self.options.measure
        if kind == "point":
            x, y = shape if len(shape) == 2 else ((shape[0] + shape[2]) / 2, (shape[1] + shape[3]) / 2)
            return float((len(shape) == 2 or is_box(shape)) and holds(box, x, y))
        if not is_box(shape):
            return -1.0 if kind == "giou" else 0.0
        left, top, right, bottom = shape
        return (giou if kind == "giou" else iou)(box, (left, top, right, bottom))

    def _share(self, value: float) -> float:
        return (value + 1) / 2 if self.options.measure == "giou" else value

    def _gold(self, answer: Any, extra: Mapping[str, Any]) -> list[Box]:
        boxes = boxes_of(answer)
        if self.options.response_coordinates == "same":
            return boxes
        x, y = (RELATIVE / side for side in _picture_size(extra))
        return [(left * x, top * y, right * x, bottom * y) for left, top, right, bottom in boxes]


def _picture_size(extra: Mapping[str, Any]) -> tuple[float, float]:
    """Width and height of a row's picture. ValueError without them."""
    size = extra.get("image_size")
    if size is None:
        size = [extra.get("width"), extra.get("height")]
    if isinstance(size, list | tuple) and len(size) == 2 and all(map(_is_side, size)):
        return size[0], size[1]
    raise ValueError(
        "response_coordinates=relative_1000 needs the picture's size in pixels, in which the answer is given: column "
        f"image_size, [width, height], or columns width and height; the row has {str(size)[:40]}"
    )


def _is_side(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf


def _told(shapes: Sequence[Shape]) -> str | None:
    return json.dumps([[round(value, 3) for value in shape] for shape in shapes[:MAX_BOXES]]) if shapes else None
