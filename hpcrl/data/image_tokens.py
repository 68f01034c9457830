"""The tokens of images in a prompt: one placeholder of the chat template becomes one token per part of its image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from hpcrl.data.chat import VISION, encode
from hpcrl.models.vision import Vision
from hpcrl.spec.media import Medium


def bound_vision(tokenizer: Any) -> Vision | None:
    """The image properties of the tokenizer's model; None if the model takes no images."""
    return getattr(tokenizer, VISION, None)


def encode_with_images(
    tokenizer: Any, text: str, images: Sequence[Medium], begins: bool = True
) -> tuple[list[int], tuple[Medium, ...]]:
    """Token ids of a rendered text with all tokens of its images, and the images with their places. ValueError if the
    text has not one placeholder per image: a chat template may leave images out."""
    token_ids = encode(tokenizer, text, begins)
    if not images:
        return token_ids, ()
    vision = bound_vision(tokenizer)
    assert vision is not None, "rows with images are refused if the model takes none"
    return expand(token_ids, vision.image_token_id, images)


def expand(
    token_ids: Sequence[int], image_token_id: int, images: Sequence[Medium]
) -> tuple[list[int], tuple[Medium, ...]]:
    """Token ids in which the n-th placeholder is repeated images[n].length times, and the images with their places.
    ValueError if there are not as many placeholders as images."""
    placeholders = sum(token == image_token_id for token in token_ids)
    if placeholders != len(images):
        raise ValueError(f"the chat template writes {placeholders} image placeholders for {len(images)} images")
    ids: list[int] = []
    placed: list[Medium] = []
    for token in token_ids:
        if token == image_token_id:
            image = images[len(placed)]
            placed.append(msgspec.structs.replace(image, start=len(ids)))
            ids += [token] * image.length
        else:
            ids.append(token)
    return ids, tuple(placed)
