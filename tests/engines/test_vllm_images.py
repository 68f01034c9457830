"""Images in vLLM: log-probs equal transformers', for mixed requests, later turns, and new weights of tower and decoder.

vLLM runs in a process of its own, since its classes of vision-language models import torchvision (tests/vllm_cpu).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from hpcrl.config import LoRAConfig, TrainerConfig
from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.gen.checks import check_requests
from hpcrl.engines.gen.generation_engine import PromptRefused
from hpcrl.engines.patches import tower_inputs
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.lora import Adapters
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.models.families import read_shape
from hpcrl.models.vision import Vision
from hpcrl.planner.adapters import adapters
from hpcrl.spec.media import IMAGE
from hpcrl.spec.trajectory import declare
from tests.engines.image_requests import (
    Answer,
    Prompts,
    ask,
    batch_of_answers,
    generated,
    known_vision,
    model_of,
    of_transformers,
)
from tests.vlm import PAD, make_vlm, noise
from tests.vlm_families import SMALL, make_small

ROOT = Path(__file__).resolve().parents[2]
QWEN = ("qwen2_5_vl", "qwen3_vl tied", "qwen3_vl_moe")
OTHERS = ("internvl tied", "smolvlm", "llava_onevision", "glm4v")
MAX_TOKENS = 42
EVERYWHERE = LoRAConfig(rank=8, alpha=16.0, parts=["decoder", "vision", "merger"])

in_vllm = [
    pytest.mark.slow,
    pytest.mark.numerics,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed (extra: vllm)"),
]


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


def tower_of(model: Any) -> Any:
    """The tower of vLLM's model."""
    modules = dict(model.named_modules())
    return next(modules[name] for name in ("visual", "vision_tower", "model.vision_model") if name in modules)


def _routes(folder: Path) -> RouteShape:
    return RouteShape.of(read_shape(json.loads((folder / "config.json").read_text())))


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
        routes=_routes(folder) if folder.name == "qwen3_vl_moe" else None,
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


def adapter_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Random adapters of all linear layers."""
    shape, generator = read_shape(json.loads((folder / "config.json").read_text())), torch.Generator().manual_seed(5)
    sizes = {p.name: p.shape for p in adapters(EVERYWHERE, shape)}
    return {name: 0.1 * torch.randn(size, generator=generator) for name, size in sizes.items()}


def with_adapters(folder: Path) -> list[Answer]:
    """The answers of vLLM's engine with adapters in tower, merger and decoder."""
    from hpcrl.engines.gen.vllm.engine import VLLMEngine
    from tests.contracts.gen.vllm import leave_groups

    prompts = Prompts(folder)
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_length": 256, "cache_bytes": 1 << 24}
    engine = VLLMEngine(folder, dtype="float32", lora=EVERYWHERE, load=False, **sizes)
    engine.load_weights(((name, torch.zeros_like(t)) for name, t in adapter_weights(folder).items()), 0)
    generated(engine, prompts.mixed(0))  # features of the tower without adapters, which must not be used again
    engine.load_weights(adapter_weights(folder).items(), 1)
    requests = prompts.mixed(20)
    found = [Answer("adapters", *pair, (0, 0)) for pair in zip(requests, generated(engine, requests), strict=True)]
    engine.close()
    leave_groups()
    return found


def main(work: str, families: Sequence[str]) -> None:
    """Write the answers for some families, in a process of vLLM."""
    torch.set_num_threads(1)
    found = {family: answers(make_folder(family, Path(work) / family)) for family in families}
    torch.save(found, f"{work}/answers")
    if families == QWEN:
        torch.save(with_adapters(Path(work) / QWEN[0]), f"{work}/adapted")
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


@pytest.mark.parametrize("family", [pytest.param(QWEN[0], marks=in_vllm)])
def test_adapters_of_the_tower_change_what_it_sees(family: str, answered: Callable[[tuple[str, ...]], Path]) -> None:
    work = answered(QWEN)
    folder = work / family
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(Adapters(EVERYWHERE).merged(dict(model.state_dict()) | adapter_weights(folder), model))
    for answer in torch.load(work / "adapted", weights_only=False):
        assert np.abs(answer.output.gen_logprobs - of_transformers(folder, model, answer)).max() < 1e-5


@pytest.mark.parametrize("family", [pytest.param("qwen3_vl_moe", marks=in_vllm)])
def test_the_routes_of_rows_with_images_are_replayed(
    family: str, answered: Callable[[tuple[str, ...]], Path], tmp_path: Path, world_of_one: None
) -> None:
    folder = answered(QWEN) / family
    found = torch.load(folder.parent / "answers", weights_only=False)[family][0][:5]
    declare(_routes(folder).field)
    known_vision(folder)
    batch = batch_of_answers([(answer.request, answer.output) for answer in found])
    model_of(folder, (0, 0)).save_pretrained(tmp_path)
    shutil.copy(folder / "preprocessor_config.json", tmp_path)

    def error(model: Path, replay: bool) -> float:
        keys: dict[str, Any] = {"own": FSDP2Config(), "dtype": torch.float32, "total_steps": 1}
        trainer = FSDP2Engine(TrainerConfig(), model, replay=replay, **keys)
        logprobs = trainer.logprobs(batch, [[0, 1, 2], [3, 4]], 1.0)
        return float((logprobs - batch.gen_logprobs)[batch.loss_mask].abs().max())

    assert error(tmp_path, True) < 1e-5 and error(tmp_path, False) < 1e-5
    assert abs(error(folder, True) - error(folder, False)) > 0.01, "routes matter under other weights"


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
