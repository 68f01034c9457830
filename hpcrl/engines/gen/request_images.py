"""The images of requests, for the generation engines that take images."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from hpcrl.engines.gen.generation_engine import Request
from hpcrl.models.families import read_vision_of, unseen_type
from hpcrl.models.vision import Vision
from hpcrl.spec.image_rows import image_rows, image_spans
from hpcrl.spec.media import ImageSpan


def image_properties(model_path: Path, families: Container[str]) -> Vision | None:
    """The image properties of a model whose images an engine gets from hpcrl; None for all other models.

    Args:
        families: The values of model_type of models with which the engine takes images.
    """
    vision = read_vision_of(model_path)
    return None if vision is None or unseen_type(families, model_path) else vision


def spans_of(request: Request) -> list[ImageSpan]:
    """The images of a request."""
    return image_spans(image_rows(request.media))
