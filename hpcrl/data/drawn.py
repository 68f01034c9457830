"""Drawn images with questions about them, for the task `shapes`: equal shapes of one colour on grey."""

from __future__ import annotations

import io
import random
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {
    "r": (220, 30, 30),
    "g": (30, 160, 40),
    "b": (40, 60, 220),
    "y": (230, 210, 30),
    "k": (10, 10, 10),
    "w": (250, 250, 250),
}
"""Answer -> colour: red, green, blue, yellow, black, white."""
SHAPES = ("square", "circle", "triangle")
GREY = (128, 128, 128)
MAX_SHAPES = 4
QUESTIONS = ("colour", "number")


def draw(rng: random.Random, side: int) -> tuple[bytes, dict[str, str]]:
    """(a PNG of side x side pixels, the answer to each of QUESTIONS): one shape in each of some quarters."""
    image = Image.new("RGB", (side, side), GREY)
    canvas = ImageDraw.Draw(image)
    colour, shape, number = rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.randint(1, MAX_SHAPES)
    half = side // 2
    for column, row in rng.sample([(column, row) for column in range(2) for row in range(2)], number):
        radius = rng.randint(half // 4, half // 2 - 2)
        x, y = (cell * half + rng.randint(radius + 1, half - radius - 1) for cell in (column, row))
        box = (x - radius, y - radius, x + radius, y + radius)
        if shape == "square":
            canvas.rectangle(box, fill=COLOURS[colour])
        elif shape == "circle":
            canvas.ellipse(box, fill=COLOURS[colour])
        else:
            canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), {"colour": colour, "number": str(number)}


def shapes_row(rng: random.Random, questions: list[str], side: int, other_image: bool) -> dict[str, Any]:
    """A row of the task: an image, one of the questions, and its answer, a single character. With `other_image`, the
    answer is of an image that is not shown."""
    content, answers = draw(rng, side)
    if other_image:
        content, _ = draw(rng, side)
    question = rng.choice(questions)
    return {
        "prompt": f"<image>{question}?",
        "answer": answers[question],
        "question": question,
        "images": [{"bytes": content, "path": None}],
    }
