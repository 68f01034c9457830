"""Requests with images for engines, and transformers' log-probs of the answers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hpcrl.data.chat import bind
from hpcrl.data.image_tokens import encode_with_images, expand
from hpcrl.data.pictures import read_picture
from hpcrl.engines.gen.generation_engine import Output, Request, SamplingParams
from hpcrl.engines.patches import tower_inputs
from hpcrl.models.families import vision_of
from hpcrl.models.vision import Vision
from hpcrl.rollout.batch import Batch, batch_from_samples
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.spec.image_rows import image_rows
from hpcrl.spec.media import IMAGES, Medium, placed
from tests.vlm import PAD, PLACEHOLDER, SPECIAL
from tests.vlm_families import SMALL, Small

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


def small_of(folder: Path) -> Small | None:
    """The family in SMALL of a folder with its name; None for a Qwen-VL model."""
    return SMALL.get(folder.name.removesuffix(" tied"))


def known_vision(folder: Path) -> Vision:
    """The image properties of a folder."""
    vision = vision_of(folder)
    assert vision is not None
    return vision


def model_of(folder: Path, seeds: tuple[int, int]) -> Any:
    """The model of the folder with other weights of tower and decoder."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    towers = known_vision(folder).towers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = generators[0 if name.startswith(towers) else 1]
            parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    return model


class Prompts:
    """Makes requests for a model folder."""

    def __init__(self, folder: Path):
        self.vision = known_vision(folder)
        self._tokenizer = bind(AutoTokenizer.from_pretrained(folder), {}, self.vision)
        small = small_of(folder)
        self._placeholder = PLACEHOLDER if small is None else small.placeholder

    def ask(self, number: int, pictures: Sequence[Sequence[Medium]], text: str) -> Request:
        """A question about these pictures, which are before it."""
        places = [self._placeholder] * len(pictures)  # a family separates neighbours only by its own marks, or by text
        text = f"question: {' and '.join(places)}{text}"
        token_ids, media = encode_with_images(self._tokenizer, text, [medium for some in pictures for medium in some])
        return Request(number, token_ids, SamplingParams(NEW_TOKENS, ignore_eos=True), seed=number, media=media)

    def picture(self, width: int, height: int, seed: int) -> list[Medium]:
        """What the model sees of random pixels, of a size in tokens of Qwen-VL models."""
        unit = self.vision.patch * self.vision.merge if self.vision.form == "patches" else 28
        shape = (height * unit, width * unit, 3)
        pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        return read_picture(file.getvalue(), self.vision)

    def mixed(self, first: int) -> list[Request]:
        """Requests with 0, 1 and 2 pictures, two members of a group, and equal token ids with different pictures. An
        image of a Qwen-VL model has more tokens than a block of the prefix cache."""
        a, b, c = self.picture(6, 7, 1), self.picture(6, 7, 2), self.picture(1, 4, 3)
        asked = [([a], "what?"), ([a], "what?"), ([b], "what?"), ([c, a], "two"), ([], "no image")]
        return [self.ask(first + i, pictures, text) for i, (pictures, text) in enumerate(asked)]

    def second_turn(self, request: Request, output: Output) -> Request:
        """With another picture, after a response in which the model wrote a placeholder."""
        wrote = self.vision.image_token_id
        said = [*output.token_ids[:5].tolist(), wrote, *output.token_ids[5:].tolist()]
        following = self.ask(0, [self.picture(3, 2, 4)], "then?")
        before = [*request.prompt_ids, *said]
        media = (*request.media, *(placed(medium, len(before)) for medium in following.media))
        return replace(following, id=50, prompt_ids=[*before, *following.prompt_ids], media=media)


def batch_of_answers(answers: Sequence[tuple[Request, Output]]) -> Batch:
    """Rows of requests and their outputs of version 1, with the outputs' columns."""
    samples = []
    for asked, output in answers:
        prompt = np.zeros(len(asked.prompt_ids), np.float32)
        mask = np.arange(len(prompt) + len(output.token_ids)) >= len(prompt)
        made = Sample(
            asked.id << 24,
            FinishReason.LENGTH,
            token_ids=np.concatenate([asked.prompt_ids, output.token_ids]).astype(np.int32),
            loss_mask=mask,
            gen_logprobs=np.concatenate([prompt, output.gen_logprobs]).astype(np.float32),
            versions=np.where(mask, 1, -1).astype(np.int32),
            turn_ids=np.where(mask, 0, -1).astype(np.int32),
        )
        made.put(IMAGES.name, image_rows(asked.media))
        for name, column in output.columns.items():
            of_prompt = np.full((len(prompt), *column.shape[1:]), np.iinfo(column.dtype).max, column.dtype)
            made.put(name, np.concatenate([of_prompt, column]))
        made.pictures = {medium.digest: medium.content for medium in asked.media}
        samples.append(made)
    return batch_from_samples(samples, list(range(len(samples)))).check()


def generated(engine: Any, requests: Sequence[Request]) -> list[Output]:
    engine.add(requests)
    outputs = {output.id: output for output in engine.step(100)}
    return [outputs[request.id] for request in requests]


def of_transformers(folder: Path, model: Any, answer: Answer) -> np.ndarray:
    """Log-probs of the response by transformers' model with its own processor, or what test_image_families compares
    with it. The model would also replace a placeholder that it wrote, which gets another id and its embedding here."""
    request, vision = answer.request, known_vision(folder)
    tokens = torch.tensor([[*request.prompt_ids, *answer.output.token_ids.tolist()]])
    of_images = torch.zeros_like(tokens, dtype=torch.bool)
    for medium in request.media:
        of_images[0, medium.start : medium.start + medium.length] = True
    given: dict[str, Any] = {}
    if request.media and small_of(folder) is not None:
        given = tower_inputs([medium.pixels for medium in request.media], vision)
    elif request.media:
        images = [Image.fromarray(medium.pixels) for medium in request.media]
        given = dict(Qwen2VLImageProcessorPil.from_pretrained(folder)(images=images, return_tensors="pt"))
    if request.media and vision.mrope:
        given["mm_token_type_ids"] = of_images.int()
    if vision.form == "tiles" and request.media:
        counts = [vision.num_patches(medium.width, medium.height) * vision.patch**2 for medium in request.media]
        parts = given["pixel_values"].split([count // vision.max_pixels for count in counts])
        given["pixel_values"] = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    wrote = vision.image_token_id
    written = (tokens == wrote) & ~of_images
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(
        lambda module, args, output: torch.where(written[..., None], module.weight[wrote], output)
    )
    with torch.no_grad(), hook:
        logits = model(input_ids=tokens.masked_fill(written, 0), use_cache=False, **given).logits[0, :-1]
    chosen = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[len(request.prompt_ids) - 1 :, 0]
    return chosen.numpy()


def ask(number: int, images: Sequence[Medium], text: str, new_tokens: int = NEW_TOKENS) -> Request:
    ids = [*b"question: ", *[START, PAD, END] * len(images), *text.encode()]
    token_ids, media = expand(ids, PAD, images)
    return Request(number, token_ids, SamplingParams(new_tokens, ignore_eos=True), seed=number, media=media)
