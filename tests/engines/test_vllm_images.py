"""Images in vLLM: log-probs equal transformers', for mixed requests, later turns, and new weights of tower and decoder.

vLLM runs in a process of its own, since its classes of vision-language models import torchvision (tests/vllm_cpu).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hpcrl.data.image_tokens import expand
from hpcrl.engines.gen.checks import check_requests
from hpcrl.engines.gen.generation_engine import Output, PromptRefused, Request, SamplingParams
from hpcrl.models.families import vision_of
from hpcrl.models.vision import Vision
from hpcrl.spec.media import IMAGE, Medium, placed
from tests.vlm import PAD, SPECIAL, make_vlm, noise

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("qwen2_5_vl", "qwen3_vl tied", "qwen3_vl_moe")
START, END = 256 + SPECIAL.index("<|vision_start|>"), 256 + SPECIAL.index("<|vision_end|>")
NEW_TOKENS = 12

in_vllm = [
    pytest.mark.slow,
    pytest.mark.numerics,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed (extra: vllm)"),
]


@dataclass(frozen=True)
class Answer:
    """A response, the seeds of the tower's and the decoder's weights, and its first token under these weights."""

    case: str
    request: Request
    output: Output
    weights: tuple[int, int]
    first: int = 0


def make_folder(family: str, folder: Path) -> Path:
    """With heads of 32 numbers, which all vLLM's kernels for CPUs have."""
    kind = family.removesuffix(" tied")
    sections: dict[str, Any] = {"mrope_section": [4, 6, 6], "rope_type": "default", "rope_theta": 1e4}
    if kind.startswith("qwen3"):
        sections |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": sections}
    if kind.startswith("qwen3"):
        text |= {"head_dim": 32, "norm_topk_prob": True, "moe_intermediate_size": 96}
    return make_vlm(kind, folder, text_config=text, tie_word_embeddings=kind != family)


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


def answers(folder: Path) -> tuple[list[Answer], list[int]]:
    """The answers of vLLM's engine for one family, and the patches in each call of its tower for the first requests."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from hpcrl.engines.gen.vllm.engine import VLLMEngine
    from tests.contracts.gen.vllm import leave_groups

    vision = vision_of(folder)
    assert vision is not None
    engine = VLLMEngine(
        folder,
        max_num_seqs=8,
        max_length=256,
        dtype="float32",
        cache_bytes=1 << 24,
        options={"block_size": 32},
        max_pixels=42 * (vision.patch * vision.merge) ** 2,
        load=False,
    )
    largest = MULTIMODAL_REGISTRY.create_processor(engine._runner.model_config).info.get_max_image_tokens()
    assert largest == 42, f"vLLM reserves memory for images of {largest} tokens"
    found, calls, version = [], [], 0

    def load(seeds: tuple[int, int], kept: Sequence[str] = ()) -> None:
        nonlocal version
        named = model_of(folder, seeds).named_parameters()
        engine.load_weights(((name, p.detach()) for name, p in named if name not in kept), version, kept)
        version += 1

    load((0, 0))
    engine._runner.get_model().visual.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    requests = mixed(vision, 0)
    outputs = generated(engine, requests)
    found += [Answer("new", asked, output, (0, 0)) for asked, output in zip(requests, outputs, strict=True)]
    first_calls = list(calls)
    again = second_turn(vision, requests[0], outputs[0])
    found.append(Answer("second turn", again, generated(engine, [again])[0], (0, 0)))
    tower = [name for name, _ in model_of(folder, (0, 0)).named_parameters() if name.startswith(vision.towers)]
    for seeds, kept in (((1, 0), ()), ((1, 1), tower)):
        running = [replace(requests[0], id=10 * version + 8), replace(requests[3], id=10 * version + 9)]
        engine.add(running)
        assert engine.step(4) == []
        waiting = mixed(vision, 10 * version)
        engine.add(waiting)  # with prefixes that are cached under the previous weights
        load(seeds, kept)
        calls.clear()
        engine.recompute()
        done = {output.id: output for output in engine.step(100)}
        assert bool(calls) != bool(kept), "only a new tower computes known images again"
        found += [Answer(f"recomputed {seeds}", asked, done[asked.id], seeds, first=4) for asked in running]
        found += [Answer(f"waited {seeds}", asked, done[asked.id], seeds) for asked in waiting]
    engine.close()
    leave_groups()
    return found, first_calls


def main(work: str) -> None:
    """Write the answers for all families, in the process of vLLM."""
    torch.set_num_threads(1)
    found = {family: answers(make_folder(family, Path(work) / family)) for family in FAMILIES}
    torch.save(found, f"{work}/answers")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may not end


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a process has written models and answers."""
    folder = tmp_path_factory.mktemp("vllm")
    paths = [str(ROOT), *([] if find_spec("torchvision") else [str(ROOT / "tests" / "vllm_cpu")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    program = f"from tests.engines.test_vllm_images import main; main({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder


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


@pytest.mark.parametrize("family", [pytest.param(family, marks=in_vllm) for family in FAMILIES])
def test_responses_have_transformers_log_probs(family: str, work: Path) -> None:
    found, calls = torch.load(work / "answers", weights_only=False)[family]
    assert len(found) == 6 + 2 * 7
    models = {seeds: model_of(work / family, seeds) for seeds in {answer.weights for answer in found}}
    for answer in found:
        wanted = of_transformers(work / family, models[answer.weights], answer)
        error = np.abs(answer.output.gen_logprobs - wanted)[answer.first :].max()
        assert error < 1e-5, f"{answer.case}, request {answer.request.id}: {error}"
    assert sum(calls) == 2 * 4 * 42 + 4 * 4, "the tower computes each of the three images once, also for a group"


UNIT = Vision(patch=14, merge=2, min_pixels=28 * 28, max_pixels=28 * 28 * 64, image_token_id=PAD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"length": 5}, "has 5 tokens, 6 are needed"),
        ({"start": 12}, "tokens 12 to 17 are not 6 placeholders"),
        ({"start": 40}, "tokens 40 to 45 are not 6 placeholders"),
        ({"width": 83}, "image 0 of 83 x 56 pixels: sides must be multiples of 28"),
    ],
)
def test_prompts_whose_images_are_elsewhere_are_refused(change: dict[str, int], message: str) -> None:
    asked = ask(3, [noise(84, 56, UNIT, 1)], "what?", new_tokens=4)
    asked = replace(asked, media=tuple(msgspec.structs.replace(medium, **change) for medium in asked.media))
    limits: dict[str, Any] = {"max_length": 64, "vocab_size": 300, "has_tokenizer": False, "media": (IMAGE,)}
    if not message:
        check_requests([asked], (), **limits, vision=UNIT)
        twice = replace(asked, media=(*asked.media, *asked.media))
        with pytest.raises(PromptRefused, match="image 1 of 84 x 56 pixels: tokens 11 to 16 are not 6 placeholders of"):
            check_requests([twice], (), **limits, vision=UNIT)
        return
    with pytest.raises(PromptRefused, match=f"request 3: .*{message}"):
        check_requests([asked], (), **limits, vision=UNIT)


@pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed (extra: vllm)")
def test_a_missing_torchvision_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcrl.engines.gen.vllm.engine import VLLMEngine

    folder = make_vlm("qwen2_5_vl", tmp_path / "model")
    monkeypatch.setattr("hpcrl.engines.gen.vllm.engine.find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"classes of .* import torchvision, which is not installed"):
        VLLMEngine(folder, max_num_seqs=2, max_length=64, dtype="float32", cache_bytes=1 << 24, load=False)
