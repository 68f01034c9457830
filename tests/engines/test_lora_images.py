"""Adapters in the decoder of a vision-language model: training, export, and log-probs of the native generator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from hpcrl.config import LoRAConfig
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.models.families import read_shape
from hpcrl.planner.adapters import adapters
from hpcrl.rollout.batch import Batch
from tests.contracts.train.fsdp2 import gradients
from tests.engines.image_requests import batch_of_answers
from tests.engines.test_images import row_by_row
from tests.engines.test_images_on_ranks import STEPS, batch_for, engine_of, stepped
from tests.engines.test_native_images import generated, requests_of, vision_of
from tests.engines.worlds import Weighted, norms_of, worst_difference
from tests.vlm import make_vlm

pytestmark = pytest.mark.numerics

LORA = LoRAConfig(rank=3, alpha=6.0)
WHOLE = LORA.model_copy(update={"parts": ["decoder", "vision", "merger"]})
PLAN = [[0, 1, 2], [3, 4]]
PREFIXES = {
    "decoder": "model.language_model.layers.",
    "vision": "model.visual.blocks.",
    "merger": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
}


def worst(some: Tensor, others: Tensor) -> float:
    return float((some - others).abs().max())


@pytest.mark.parametrize(("family", "lora"), [("qwen2_5_vl", LORA), ("qwen3_vl_moe", LORA), ("qwen3_vl", WHOLE)])
def test_adapters_are_trained_and_merged(family: str, lora: LoRAConfig, tmp_path: Path, world_of_one: None) -> None:
    folder = make_vlm(family, tmp_path / "model")
    whole, trainer = batch_for(folder), engine_of(folder, lora=lora, **STEPS)
    base = engine_of(folder).logprobs(whole, PLAN, 1.0)
    assert worst(trainer.logprobs(whole, PLAN, 1.0), base) < 2e-5  # adapters begin as zero
    names = trainer.weights.names
    assert {part for name in names for part in PREFIXES if name.startswith(PREFIXES[part])} == set(lora.parts)
    stepped(trainer, whole)
    got = trainer.logprobs(whole, PLAN, 1.0)
    assert worst(got, base) > 0.1 and worst(trainer.reference_logprobs(whole, PLAN, 1.0), base) < 2e-5
    trainer.export_hf(tmp_path / "out")
    assert worst(engine_of(tmp_path / "out").logprobs(whole, PLAN, 1.0), got) < 2e-5


def test_a_target_of_the_tower_is_refused(tmp_path: Path, world_of_one: None) -> None:
    folder = make_vlm("qwen2_5_vl", tmp_path / "model")
    with pytest.raises(ValueError, match="target_modules: qkv: the model has none, whose linear layers are q_proj, "):
        engine_of(folder, lora=LoRAConfig(rank=3, target_modules=["qkv"]))


def test_the_tower_has_the_gradients_of_peft(tmp_path: Path, world_of_one: None) -> None:
    """Of adapters in every linear layer of the model."""
    peft = pytest.importorskip("peft")
    folder = make_vlm("qwen2_5_vl", tmp_path / "model")
    whole, trainer = batch_for(folder), engine_of(folder, lora=WHOLE, **STEPS)
    stepped(trainer, whole)
    trainer.export_hf(tmp_path / "out")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "out" / "adapter", is_trainable=True)
    want, theirs = row_by_row(adapted, folder, whole)
    got = gradients(trainer, whole, PLAN, Weighted(), norms_of(whole))
    assert worst(trainer.logprobs(whole, PLAN, 1.0), want) < 2e-5
    named = {name.removeprefix("base_model.model.").replace(".default", ""): value for name, value in theirs.items()}
    assert worst_difference(got, named) < 1e-5
    planned = {p.name: p.shape for p in adapters(WHOLE, read_shape(json.loads((folder / "config.json").read_text())))}
    assert {held.name: held.shape for held in trainer.weight_layout()} == planned


@pytest.mark.parametrize("lora", [LORA, WHOLE], ids=["decoder", "whole"])
def test_the_native_generator_has_the_log_probs_of_the_trainer(
    lora: LoRAConfig, tmp_path: Path, world_of_one: None
) -> None:
    folder = make_vlm("qwen2_5_vl", tmp_path / "model")
    whole, trainer = batch_for(folder), engine_of(folder, lora=lora, **STEPS)
    stepped(trainer, whole)
    sizes = {"max_num_seqs": 8, "max_length": 128, "dtype": torch.float32, "block_tokens": 4}
    generator = NativeEngine(folder, lora=lora, load=False, **sizes)
    generator.load_weights(trainer.named_weights(), 1)
    batch = _answered(folder, generator)
    assert worst(trainer.logprobs(batch, PLAN, 1.0), batch.gen_logprobs) < 2e-5
    assert worst(trainer.reference_logprobs(batch, PLAN, 1.0), batch.gen_logprobs) > 0.1


def _answered(folder: Path, generator: NativeEngine) -> Batch:
    """The responses to requests with and without images."""
    vision = vision_of(folder)
    assert vision is not None
    requests = requests_of(vision)
    outputs = generated(generator, requests)
    return batch_of_answers([(asked, outputs[asked.id]) for asked in requests])
