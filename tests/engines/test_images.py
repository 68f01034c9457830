"""Images in the FSDP2 engine: packed rows have the log-probs and gradients of transformers' own model, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hpcrl.config import TrainerConfig
from hpcrl.data.image_tokens import expand
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.models.families import vision_of
from hpcrl.models.vision import Vision
from hpcrl.rollout.batch import Batch, Norms, batch_from_samples
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.spec.image_rows import image_rows, image_spans
from hpcrl.spec.media import IMAGES, Medium
from tests.engines.worlds import Weighted
from tests.vlm import FAMILIES, PAD, SPECIAL, make_vlm, noise

pytestmark = pytest.mark.numerics

START, END = 256 + SPECIAL.index("<|vision_start|>"), 256 + SPECIAL.index("<|vision_end|>")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_vlm(family, tmp_path_factory.mktemp("vlm") / family) for family in FAMILIES}


def sample(number: int, images: list[Medium], text: str, answer: str) -> Sample:
    """A row with its images after the first two tokens."""
    ids = [*b"q:"]
    for _ in images:
        ids += [START, PAD, END]
    token_ids, media = expand([*ids, *text.encode()], PAD, images)
    return row_of(number, token_ids, answer, media)


def row_of(number: int, prompt: Sequence[int], answer: str, media: Sequence[Medium]) -> Sample:
    """A row of a prompt, with its images in their places, and an answer of bytes."""
    token_ids, count = [*prompt, *answer.encode()], len(prompt)
    mask = np.arange(len(token_ids)) >= count
    made = Sample(
        number,
        FinishReason.STOP,
        token_ids=np.array(token_ids, np.int32),
        loss_mask=mask,
        gen_logprobs=np.zeros(len(mask), np.float32),
        versions=np.full(len(mask), -1, np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
    )
    made.put(IMAGES.name, image_rows(media))
    made.pictures = {medium.digest: medium.content for medium in media}
    return made


def batch_of(vision: Vision) -> Batch:
    """Rows with one image, the same one again, another one under the same text, two images, and none."""
    unit = vision.patch * vision.merge
    a, b = (noise(3 * unit, 2 * unit, vision, seed) for seed in (1, 2))
    c = noise(unit, 4 * unit, vision, 3)
    rows = [
        sample(0, [a], "what?", "red square"),
        sample(1, [a], "what?", "blue"),
        sample(2, [b], "what?", "red"),
        sample(3, [c, a], "two", "many words here"),
        sample(4, [], "no image", "text only"),
    ]
    return batch_from_samples(rows, [0, 0, 1, 2, 3]).check()


def separately(folder: Path, batch: Batch, family: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of transformers' model and its own processor, a row at a time; gradients of the loss of Weighted."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return row_by_row(model, folder, batch)


def row_by_row(model: Any, folder: Path, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """As separately(), of a model in memory."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    found, cu = [], batch.cu("images").tolist()
    for row, tokens in enumerate(batch.token_ids.split(batch.lengths.tolist())):
        given: dict[str, Any] = {}
        if spans := image_spans(batch.images[cu[row] : cu[row + 1]].numpy()):
            shown = [np.frombuffer(batch.pictures[s.digest], np.uint8).reshape(s.height, s.width, 3) for s in spans]
            given = dict(processor(images=[Image.fromarray(image) for image in shown], return_tensors="pt"))
            given["mm_token_type_ids"] = (tokens[None] == PAD).int()
        logits = model(input_ids=tokens[None], use_cache=False, **given).logits[0, :-1]
        found += [torch.zeros(1), logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]]
        for module in model.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None
    logprobs = torch.cat(found) * batch.loss_mask
    weights = torch.cos(batch.token_ids.float() + batch.position_ids) + 0.5  # as in Weighted
    (-(logprobs * weights)[batch.loss_mask].sum() / batch.loss_mask.sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach(), gradients


def engine_of(folder: Path, **own: Any) -> FSDP2Engine:
    return FSDP2Engine(TrainerConfig(), folder, own=FSDP2Config(**own), dtype=torch.float32, total_steps=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_transformers(family: str, folders: dict[str, Path], world_of_one: None) -> None:
    folder = folders[family]
    vision = vision_of(folder)
    assert vision is not None
    batch = batch_of(vision)
    want, gradients = separately(folder, batch, family)
    norms = Norms(float(batch.loss_mask.sum()), float(batch.num_sequences))
    engine = engine_of(folder, packing="require")
    for plan in ([[0, 1, 2, 3, 4]], [[4], [0, 3], [1, 2], []]):
        assert (engine.logprobs(batch, plan, 1.0) - want).abs().max() < 2e-5
        engine.accumulate(batch, plan, Weighted(), norms)
        got = {name.removeprefix("hf."): p.grad for name, p in engine.model.named_parameters()}
        for name, gradient in gradients.items():
            assert (got[name] - gradient).abs().max() < 2e-5 * max(1.0, float(gradient.abs().max())), name
        engine.discard_gradients()
