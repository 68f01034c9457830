"""Checks that every generation engine makes before it queues a request."""

from __future__ import annotations

from collections.abc import Container, Sequence

from hpcrl.engines.gen.generation_engine import PromptRefused, Request
from hpcrl.models.vision import Vision


def check_requests(
    requests: Sequence[Request],
    in_use: Container[int],
    *,
    max_length: int,
    vocab_size: int,
    has_tokenizer: bool,
    media: Container[str] = (),
    vision: Vision | None = None,
) -> None:
    """ValueError names the first request that can never be served; PromptRefused if its prompt is the cause.

    Args:
        media: The kinds of media that the engine supports.
        vision: The image properties of the model, with which the places of images are checked.
    """
    seen: set[int] = set()
    for request in requests:
        if request.id in in_use or request.id in seen:
            raise ValueError(f"request {request.id}: this id is already in use; abort it first or give a new one")
        seen.add(request.id)
        for problem in _parameter_problems(request, has_tokenizer):
            raise ValueError(f"request {request.id}: {problem}")
        for problem in _prompt_problems(request, max_length, vocab_size, media, vision):
            raise PromptRefused(f"request {request.id}: {problem}")


def _parameter_problems(request: Request, has_tokenizer: bool) -> list[str]:
    params = request.params
    checks = {
        f"max_new_tokens is {params.max_new_tokens}, at least 1 is needed": params.max_new_tokens < 1,
        f"temperature is {params.temperature}, 0 (greedy) or more is needed": not params.temperature >= 0,
        f"top_p is {params.top_p}, more than 0 and at most 1 is needed": not 0 < params.top_p <= 1,
        f"top_k is {params.top_k}, 0 (off) or more is needed": params.top_k < 0,
        f"min_p is {params.min_p}, 0 (off) to 1 is needed": not 0 <= params.min_p <= 1,
        f"the seed {request.seed} is not an unsigned 64-bit integer": not 0 <= request.seed < 1 << 64,
        f"{params.stop!r} among the stop strings is empty": "" in params.stop,
        f"stop strings {params.stop!r} need an engine with a tokenizer": bool(params.stop) and not has_tokenizer,
    }
    return [text for text, wrong in checks.items() if wrong]


def _prompt_problems(
    request: Request, max_length: int, vocab_size: int, media: Container[str], vision: Vision | None
) -> list[str]:
    params, ids = request.params, request.prompt_ids
    if len(ids) == 0:
        return ["the prompt is empty"]
    if len(ids) + params.max_new_tokens > max_length:
        asked = f"{len(ids)} prompt tokens + max_new_tokens {params.max_new_tokens}"
        return [f"{asked} exceed the engine's max_length {max_length}"]
    if refused := next((medium.kind for medium in request.media if medium.kind not in media), None):
        return [f"the prompt has a medium of kind {refused}, which the engine does not take"]
    if min(ids) < 0 or max(ids) >= vocab_size:
        return [f"prompt token {min(ids) if min(ids) < 0 else max(ids)} is outside the vocabulary of {vocab_size}"]
    return [] if vision is None else _image_problems(request, vision)


def _image_problems(request: Request, vision: Vision) -> list[str]:
    """Problems of images' sizes and places. The prompt may have more placeholder tokens than images, because a model
    can generate them, and then they are text."""
    unit, end = vision.patch * vision.merge, 0
    for number, medium in enumerate(request.media):
        size = f"image {number} of {medium.width} x {medium.height} pixels"
        whole = vision.form == "tiles" or not (medium.width % unit or medium.height % unit)
        if min(medium.width, medium.height) < 1 or not whole:
            return [f"{size}: sides must be multiples of {unit}"]
        wanted, first = vision.num_tokens(medium.width, medium.height), medium.start
        if medium.length != wanted:
            return [f"{size} has {medium.length} tokens, {wanted} are needed"]
        if (
            first < end
            or any(token != vision.image_token_id for token in request.prompt_ids[first : first + wanted])
            or first + wanted > len(request.prompt_ids)
        ):
            return [f"{size}: tokens {first} to {first + wanted - 1} are not {wanted} placeholders of its own"]
        end = first + wanted
    return []
