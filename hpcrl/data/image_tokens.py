"""The tokens of images in a prompt: one placeholder of the chat template becomes one token per part of its image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from hpcrl.data.chat import VISION, encode
from hpcrl.models.vision import Vision
from hpcrl.spec.media import Medium, by_picture


def bound_vision(tokenizer: Any) -> Vision | None:
    """The image properties of the tokenizer's model; None if the model takes no images."""
    return getattr(tokenizer, VISION, None)


def encode_with_images(
    tokenizer: Any, text: str, images: Sequence[Medium], begins: bool = True
) -> tuple[list[int], tuple[Medium, ...]]:
    """Token ids of a rendered text with all tokens of its images, and the images with their places. ValueError if the
    text has not one placeholder per image: a chat template may leave images out."""
    if not images:
        return encode(tokenizer, text, begins), ()
    vision = bound_vision(tokenizer)
    assert vision is not None, "rows with images are refused if the model takes none"
    text = write_pictures(text, vision, iter(by_picture(images)))
    token_ids = encode(tokenizer, text, begins)
    return expand(token_ids, vision.image_token_id, images)


def write_pictures(text: str, vision: Vision, pictures: Iterator[Sequence[Medium]]) -> str:
    """The rendered text in which each picture's placeholder has become its marks, with one image token per part of the
    picture. ValueError if there are fewer pictures."""
    if not vision.placeholder:
        return text
    first, *others = text.split(vision.placeholder)
    parts = [first]
    for other in others:
        picture = next(pictures, None)
        if picture is None:
            raise ValueError("the chat template writes more image placeholders than there are images")
        parts += [vision.written(picture), other]
    return "".join(parts)


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
