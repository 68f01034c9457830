"""The tokens of images in a prompt: one placeholder of the chat template becomes one token per part of its image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of an image: token_ids[start : start + length]."""

    start: int
    length: int


def expand(token_ids: Sequence[int], image_token: int, lengths: Sequence[int]) -> tuple[list[int], list[Span]]:
    """Token ids in which the n-th `image_token` is repeated lengths[n] times, and the span of each image. ValueError if
    there are not as many placeholders as images: a chat template may leave images out."""
    placeholders = sum(token == image_token for token in token_ids)
    if placeholders != len(lengths):
        raise ValueError(f"the chat template writes {placeholders} image placeholders for {len(lengths)} images")
    ids: list[int] = []
    spans: list[Span] = []
    for token in token_ids:
        if token == image_token:
            spans.append(Span(len(ids), lengths[len(spans)]))
            ids += [image_token] * spans[-1].length
        else:
            ids.append(token)
    return ids, spans
