"""A dialogue's tokens and the place of its score, as the role reward_model, transformers and training read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcrl.data.chat import render
from hpcrl.data.image_tokens import encode_with_images
from hpcrl.spec.media import Medium


def dialogue_tokens(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """The token ids of a dialogue that ends with a model turn, rendered with the chat template. TemplateRefusal if the
    template raises any error."""
    return dialogue_with_images(tokenizer, messages, ())[0]


def dialogue_with_images(
    tokenizer: Any, messages: list[dict[str, Any]], images: Sequence[Medium]
) -> tuple[list[int], tuple[Medium, ...]]:
    """The token ids of a dialogue with an IMAGE_MARK for each image, and the images with their places. TemplateRefusal
    if the template raises any error, ValueError if it leaves images out."""
    return encode_with_images(tokenizer, render(tokenizer, messages, None, ask=False), images)


def padding_token(tokenizer: Any) -> int:
    """The pad_token_id of a reward model with this tokenizer, which transformers needs to find a sequence's end: the
    tokenizer's own, or its end-of-sequence token, as in TRL. ValueError if it has neither."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError("the tokenizer has neither a padding nor an end-of-sequence token")


def scored_index(token_ids: Sequence[int], padding: int) -> int:
    """The index of the token whose value is the sequence's score: the last that is not the padding token, as in
    transformers' models for sequence classification; 0 if there is none."""
    return next((index for index in reversed(range(len(token_ids))) if token_ids[index] != padding), 0)
