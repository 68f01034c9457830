"""Images in the native generator: log-probs equal transformers', also with equal token ids of different images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from hpcrl.engines.gen.generation_engine import Output, Request, SamplingParams
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.gen.native.images import make_tower
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.models.families import vision_of
from hpcrl.models.vision import Vision
from hpcrl.rollout.batch import batch_from_samples
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.spec.image_rows import image_rows
from hpcrl.spec.media import IMAGES, Medium
from tests.vlm import PAD, SPECIAL, make_vlm, noise

pytestmark = pytest.mark.numerics

NATIVE = ("qwen2_5_vl", "qwen3_5", "qwen3_5_moe")
START, END = 256 + SPECIAL.index("<|vision_start|>"), 256 + SPECIAL.index("<|vision_end|>")


@pytest.fixture(scope="module", params=NATIVE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm(request.param, tmp_path_factory.mktemp("vlm") / request.param)


def request(number: int, images: Sequence[Medium], text: str, **params: Any) -> Request:
    ids = [*b"q:", *[START, PAD, END] * len(images), *text.encode()]
    token_ids, media = expand(ids, PAD, images)
    limits = SamplingParams(max_new_tokens=9, ignore_eos=True, **params)
    return Request(number, token_ids, limits, seed=number, media=media)


def engine_of(folder: Path, **changes: Any) -> NativeEngine:
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_length": 128, "dtype": torch.float32, "block_tokens": 4}
    return NativeEngine(folder, **(sizes | changes))


def generated(engine: NativeEngine, requests: Sequence[Request]) -> dict[int, Output]:
    engine.add(requests)
    return {output.id: output for output in engine.step(100)}


def of_transformers(folder: Path, request: Request, output: Output) -> Tensor:
    """Log-probs of the response by transformers' model with its own processor."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([[*request.prompt_ids, *output.token_ids.tolist()]])
    given: dict[str, Any] = {}
    if request.media:
        images = [Image.fromarray(medium.pixels) for medium in request.media]
        given = dict(Qwen2VLImageProcessorPil.from_pretrained(folder)(images=images, return_tensors="pt"))
        placeholders = torch.zeros_like(tokens)
        for medium in request.media:
            placeholders[0, medium.start : medium.start + medium.length] = 1
        given["mm_token_type_ids"] = placeholders.int()
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False, **given).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[len(request.prompt_ids) - 1 :, 0]


def requests_of(vision: Vision) -> list[Request]:
    unit = vision.patch * vision.merge
    a, b = (noise(3 * unit, 2 * unit, vision, seed) for seed in (1, 2))
    c = noise(unit, 4 * unit, vision, 3)
    return [
        request(0, [a], "what?"),
        request(1, [a], "what?"),
        request(2, [b], "what?"),
        request(3, [c, a], "two"),
        request(4, [], "no image"),
    ]


@pytest.mark.parametrize("changes", [{}, {"deterministic": True}, {"max_num_seqs": 2}, {"kv_cache_bytes": 80_000}])
def test_responses_have_transformers_log_probs(folder: Path, changes: dict[str, Any]) -> None:
    vision = vision_of(folder)
    assert vision is not None
    requests = requests_of(vision)
    outputs = generated(engine_of(folder, **changes), requests)
    assert len(outputs) == 5
    for asked in requests:
        output = outputs[asked.id]
        assert np.abs(output.gen_logprobs - of_transformers(folder, asked, output).numpy()).max() < 2e-5


def test_a_later_request_with_another_image_shares_no_prefix(folder: Path) -> None:
    vision = vision_of(folder)
    assert vision is not None
    engine, requests = engine_of(folder), requests_of(vision)
    for asked in (requests[0], requests[2], requests[1], replace(requests[3], continues=True)):
        output = generated(engine, [asked])[asked.id]
        assert np.abs(output.gen_logprobs - of_transformers(folder, asked, output).numpy()).max() < 2e-5
    following = [*requests[3].prompt_ids, *output.token_ids.tolist(), *b"more"]
    again = replace(requests[3], id=9, prompt_ids=following)
    output = generated(engine, [again])[9]
    assert np.abs(output.gen_logprobs - of_transformers(folder, again, output).numpy()).max() < 2e-5


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tower_is_made_without_random_numbers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Its buffers equal a loaded model's. A trainer in the same process draws what it would have drawn."""
    folder = make_vlm(family, tmp_path / "model")
    loaded: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).model.visual
    state = torch.get_rng_state()
    tower = make_tower(folder, dtype, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    wanted, found = dict(loaded.named_buffers()), dict(tower.named_buffers())
    assert found.keys() == wanted.keys() != set()
    for name, buffer in wanted.items():
        assert found[name].dtype == buffer.dtype and torch.equal(found[name], buffer), name
    assert {name: (p.shape, p.dtype) for name, p in tower.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in loaded.named_parameters()
    }


def test_an_image_token_that_the_model_wrote_is_text_to_generator_and_trainer(folder: Path, world_of_one: None) -> None:
    """transformers refuses such a row, since it finds images by their token ids."""
    vision = vision_of(folder)
    assert vision is not None
    asked = requests_of(vision)[0]
    asked = replace(asked, prompt_ids=[*asked.prompt_ids, *b"it", PAD, *b"was", PAD, *b"?"])
    output = generated(engine_of(folder), [asked])[0]
    ids = np.array([*asked.prompt_ids, *output.token_ids], np.int32)
    mask = np.arange(len(ids)) >= len(asked.prompt_ids)
    versions, turns = np.where(mask, 0, -1).astype(np.int32), np.where(mask, 0, -1).astype(np.int32)
    zeros = np.zeros(len(ids), np.float32)
    columns = {"token_ids": ids, "loss_mask": mask, "gen_logprobs": zeros, "versions": versions, "turn_ids": turns}
    row = Sample(0, FinishReason.STOP, **columns)
    row.put(IMAGES.name, image_rows(asked.media))
    row.pictures = {medium.digest: medium.content for medium in asked.media}
    engine = FSDP2Engine(TrainerConfig(), folder, own=FSDP2Config(), dtype=torch.float32, total_steps=1)
    trained = engine.logprobs(batch_from_samples([row], [0]).check(), [[0]], 1.0)[torch.from_numpy(mask)]
    assert np.abs(output.gen_logprobs - trained.numpy()).max() < 2e-5
