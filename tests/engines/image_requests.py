"""Requests with images for engines, and transformers' log-probs of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hpcrl.data.image_tokens import expand
from hpcrl.engines.gen.generation_engine import Output, Request, SamplingParams
from hpcrl.models.vision import Vision
from hpcrl.spec.media import Medium, placed
from tests.vlm import PAD, SPECIAL, noise

START, END = 256 + SPECIAL.index("<|vision_start|>"), 256 + SPECIAL.index("<|vision_end|>")
NEW_TOKENS = 12


@dataclass(frozen=True)
class Answer:
    """A response, the seeds of the tower's and the decoder's weights, and its first token under these weights."""

    case: str
    request: Request
    output: Output
    weights: tuple[int, int]
    first: int = 0


def model_of(folder: Path, seeds: tuple[int, int]) -> Any:
    """The model of the folder with other weights of tower and decoder."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = generators[0 if name.startswith("model.visual.") else 1]
            parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    return model


def ask(number: int, images: Sequence[Medium], text: str, new_tokens: int = NEW_TOKENS) -> Request:
    ids = [*b"question: ", *[START, PAD, END] * len(images), *text.encode()]
    token_ids, media = expand(ids, PAD, images)
    return Request(number, token_ids, SamplingParams(new_tokens, ignore_eos=True), seed=number, media=media)


def mixed(vision: Vision, first: int) -> list[Request]:
    """Requests with 0, 1 and 2 images, two members of a group, and equal token ids with different images. An image has
    more tokens than a block of the prefix cache."""
    unit = vision.patch * vision.merge
    a, b = (noise(6 * unit, 7 * unit, vision, seed) for seed in (1, 2))
    c = noise(unit, 4 * unit, vision, 3)
    asked = [([a], "what?"), ([a], "what?"), ([b], "what?"), ([c, a], "two"), ([], "no image")]
    return [ask(first + i, images, text) for i, (images, text) in enumerate(asked)]


def generated(engine: Any, requests: Sequence[Request]) -> list[Output]:
    engine.add(requests)
    outputs = {output.id: output for output in engine.step(100)}
    return [outputs[request.id] for request in requests]


def second_turn(vision: Vision, request: Request, output: Output) -> Request:
    """With another image, after a response in which the model wrote a placeholder."""
    image = noise(vision.patch * vision.merge * 3, vision.patch * vision.merge * 2, vision, 4)
    said = [*output.token_ids[:5].tolist(), PAD, *output.token_ids[5:].tolist()]
    following = ask(0, [image], "then?")
    before = [*request.prompt_ids, *said]
    media = (*request.media, *(placed(medium, len(before)) for medium in following.media))
    return replace(following, id=50, prompt_ids=[*before, *following.prompt_ids], media=media)


def of_transformers(folder: Path, model: Any, answer: Answer) -> np.ndarray:
    """Log-probs of the response by transformers' model with its own processor. It would also replace a placeholder that
    the model wrote, which gets another id and its embedding here."""
    request = answer.request
    tokens = torch.tensor([[*request.prompt_ids, *answer.output.token_ids.tolist()]])
    of_images = torch.zeros_like(tokens, dtype=torch.bool)
    for medium in request.media:
        of_images[0, medium.start : medium.start + medium.length] = True
    given: dict[str, Any] = {}
    if request.media:
        images = [Image.fromarray(medium.pixels) for medium in request.media]
        given = dict(Qwen2VLImageProcessorPil.from_pretrained(folder)(images=images, return_tensors="pt"))
        given["mm_token_type_ids"] = of_images.int()
    written = (tokens == PAD) & ~of_images
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(
        lambda module, args, output: torch.where(written[..., None], module.weight[PAD], output)
    )
    with torch.no_grad(), hook:
        logits = model(input_ids=tokens.masked_fill(written, 0), use_cache=False, **given).logits[0, :-1]
    chosen = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[len(request.prompt_ids) - 1 :, 0]
    return chosen.numpy()
