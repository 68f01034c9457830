"""Images in vLLM: log-probs equal transformers', for mixed requests, later turns, and new weights of tower and decoder.

vLLM runs in a process of its own, since its classes of vision-language models import torchvision (tests/vllm_cpu).
"""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hpcrl.data.chat import bind
from hpcrl.data.image_tokens import encode_with_images, expand
from hpcrl.data.pictures import read_picture
from hpcrl.engines.gen.checks import check_requests
from hpcrl.engines.gen.generation_engine import Output, PromptRefused, Request, SamplingParams
from hpcrl.engines.patches import tower_inputs
from hpcrl.models.families import vision_of
from hpcrl.models.vision import Vision
from hpcrl.spec.media import IMAGE, Medium, placed
from tests.vlm import PAD, PLACEHOLDER, SPECIAL, make_vlm, noise
from tests.vlm_families import SMALL, make_small

ROOT = Path(__file__).resolve().parents[2]
QWEN = ("qwen2_5_vl", "qwen3_vl tied", "qwen3_vl_moe")
OTHERS = ("internvl tied", "smolvlm", "llava_onevision", "glm4v")
MAX_TOKENS = 42
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
    kind, tied = family.removesuffix(" tied"), family.endswith(" tied")
    text: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    if family in OTHERS:
        text |= {"head_dim": 32, "tie_word_embeddings": tied}
        if (rope := SMALL[kind].config["text_config"].get("rope_parameters")) is not None:
            text["rope_parameters"] = rope | {"mrope_section": [4, 2, 2]}
        more = {"vision_aspect_ratio": "anyres_max_9"} if kind == "llava_onevision" else {}
        return make_small(kind, folder, text_config=text, tie_word_embeddings=tied, **more)
    sections: dict[str, Any] = {"mrope_section": [4, 6, 6], "rope_type": "default", "rope_theta": 1e4}
    if kind.startswith("qwen3"):
        sections |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        text |= {"head_dim": 32, "norm_topk_prob": True, "moe_intermediate_size": 96}
    return make_vlm(kind, folder, text_config=text | {"rope_parameters": sections}, tie_word_embeddings=tied)


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
        kind = folder.name.removesuffix(" tied")
        self._placeholder = SMALL[kind].placeholder if kind in SMALL else PLACEHOLDER

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


def generated(engine: Any, requests: Sequence[Request]) -> list[Output]:
    engine.add(requests)
    outputs = {output.id: output for output in engine.step(100)}
    return [outputs[request.id] for request in requests]


def tower_of(model: Any) -> Any:
    """The tower of vLLM's model."""
    modules = dict(model.named_modules())
    return next(modules[name] for name in ("visual", "vision_tower", "model.vision_model") if name in modules)


def answers(folder: Path) -> tuple[list[Answer], list[int]]:
    """The answers of vLLM's engine for one family, and the patches or squares in each call of its tower for the first
    requests."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from hpcrl.engines.gen.vllm.engine import VLLMEngine
    from tests.contracts.gen.vllm import leave_groups

    prompts = Prompts(folder)
    vision = prompts.vision
    limits: dict[str, Any] = {"max_image_tokens": MAX_TOKENS}  # as by data.max_prompt_tokens
    if folder.name == "qwen2_5_vl":
        limits = {"max_pixels": MAX_TOKENS * (vision.patch * vision.merge) ** 2}
    engine = VLLMEngine(
        folder,
        **limits,
        max_num_seqs=8,
        max_length=256,
        dtype="float32",
        cache_bytes=1 << 24,
        options={"block_size": 32},
        load=False,
    )
    assert engine._runner.mm_budget.mm_max_toks_per_item == {"image": min(MAX_TOKENS, vision.max_tokens)}
    if folder.name in QWEN:
        largest = MULTIMODAL_REGISTRY.create_processor(engine._runner.model_config).info.get_max_image_tokens()
        assert largest == MAX_TOKENS, f"vLLM reserves memory for images of {largest} tokens"
    found, calls, version = [], [], 0

    def load(seeds: tuple[int, int], kept: Sequence[str] = ()) -> None:
        nonlocal version
        named = model_of(folder, seeds).named_parameters()
        engine.load_weights(((name, p.detach()) for name, p in named if name not in kept), version, kept)
        version += 1

    load((0, 0))

    def called(module: Any, args: Any, kwargs: Any) -> None:
        calls.append(len(args[0] if args else kwargs["pixel_values"]))

    tower_of(engine._runner.get_model()).register_forward_pre_hook(called, with_kwargs=True)
    requests = prompts.mixed(0)
    outputs = generated(engine, requests)
    found += [Answer("new", asked, output, (0, 0)) for asked, output in zip(requests, outputs, strict=True)]
    first_calls = list(calls)
    again = prompts.second_turn(requests[0], outputs[0])
    found.append(Answer("second turn", again, generated(engine, [again])[0], (0, 0)))
    tower = [name for name, _ in model_of(folder, (0, 0)).named_parameters() if name.startswith(vision.towers)]
    for seeds, kept in (((1, 0), ()), ((1, 1), tower)):
        running = [replace(requests[0], id=10 * version + 8), replace(requests[3], id=10 * version + 9)]
        engine.add(running)
        assert engine.step(4) == []
        waiting = prompts.mixed(10 * version)
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


def main(work: str, families: Sequence[str]) -> None:
    """Write the answers for some families, in a process of vLLM."""
    torch.set_num_threads(1)
    found = {family: answers(make_folder(family, Path(work) / family)) for family in families}
    torch.save(found, f"{work}/answers")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may not end


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """The folder in which a process has written some families' models and answers."""

    @functools.cache
    def work(families: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("vllm")
        paths = [str(ROOT), *([] if find_spec("torchvision") else [str(ROOT / "tests" / "vllm_cpu")])]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
        program = f"from tests.engines.test_vllm_images import main; main({str(folder)!r}, {families!r})"
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return folder

    return work


def of_transformers(folder: Path, model: Any, answer: Answer) -> np.ndarray:
    """Log-probs of the response by transformers' model with its own processor, or what test_image_families compares
    with it. The model would also replace a placeholder that it wrote, which gets another id and its embedding here."""
    request, vision = answer.request, known_vision(folder)
    tokens = torch.tensor([[*request.prompt_ids, *answer.output.token_ids.tolist()]])
    of_images = torch.zeros_like(tokens, dtype=torch.bool)
    for medium in request.media:
        of_images[0, medium.start : medium.start + medium.length] = True
    given: dict[str, Any] = {}
    if request.media and folder.name in OTHERS:
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


@pytest.mark.parametrize("family", [pytest.param(family, marks=in_vllm) for family in (*QWEN, *OTHERS)])
def test_responses_have_transformers_log_probs(family: str, answered: Callable[[tuple[str, ...]], Path]) -> None:
    work = answered(QWEN if family in QWEN else OTHERS)
    found, calls = torch.load(work / "answers", weights_only=False)[family]
    assert len(found) == 6 + 2 * 7
    models = {seeds: model_of(work / family, seeds) for seeds in {answer.weights for answer in found}}
    for answer in found:
        logprobs = of_transformers(work / family, models[answer.weights], answer)
        error = np.abs(answer.output.gen_logprobs - logprobs)[answer.first :].max()
        assert error < 1e-5, f"{answer.case}, request {answer.request.id}: {error}"
    if family in QWEN:
        wanted = 2 * 4 * MAX_TOKENS + 4 * 4
    else:
        vision = known_vision(work / family)
        shown = {medium.digest: medium.pixels for answer in found[:5] for medium in answer.request.media}
        pixels = [tower_inputs([image], vision)["pixel_values"] for image in shown.values()]
        wanted = sum(len(each[0] if vision.form == "listed squares" else each) for each in pixels)
    assert sum(calls) == wanted, "the tower computes each image once, also for a group"


START, END = 256 + SPECIAL.index("<|vision_start|>"), 256 + SPECIAL.index("<|vision_end|>")
UNIT = Vision(patch=14, merge=2, min_pixels=28 * 28, max_pixels=28 * 28 * 64, image_token_id=PAD)


def ask(number: int, images: Sequence[Medium], text: str, new_tokens: int) -> Request:
    ids = [*b"question: ", *[START, PAD, END] * len(images), *text.encode()]
    token_ids, media = expand(ids, PAD, images)
    return Request(number, token_ids, SamplingParams(new_tokens, ignore_eos=True), seed=number, media=media)


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
