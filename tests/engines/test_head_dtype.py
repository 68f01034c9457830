"""A vocabulary projection in fp32 in bf16 models: trainer and generator agree better, also with a tied matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hpcrl.config import TrainerConfig
from hpcrl.engines.gen.native.engine import NativeEngine
from tests.bench.head_dtype import differences, generated
from tests.engines.test_native import make_model, prompt_of
from tests.engines.worlds import VOCAB, make_model_folder
from tests.planner.measuring import make_engine

if TYPE_CHECKING:
    from hpcrl.engines.train.megatron.engine import MegatronEngine

pytestmark = pytest.mark.numerics

PROMPTS = [[token % VOCAB for token in prompt_of(i, 8)] for i in range(16)]


def large_logits(folder: Path, tied: bool, **changes: int) -> Path:
    """A model whose logits are all near 80, where bfloat16 has steps of .5: one number of the hidden states is large
    for every token, and so is its column in the projection."""
    make_model_folder("qwen2", folder, tie_word_embeddings=tied, **changes)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name][:, 0] = 4.0
    weights["model.norm.weight"][0] = 4.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def native(folder: Path, float32_head: bool) -> NativeEngine:
    return NativeEngine(folder, max_num_seqs=16, max_length=40, dtype=torch.bfloat16, float32_head=float32_head)


def make_megatron(folder: Path, **config: Any) -> MegatronEngine:
    from hpcrl.engines.train.megatron.engine import MegatronEngine

    return MegatronEngine(TrainerConfig(engine="megatron", **config), folder, total_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "make"),
    [(True, make_engine), (False, make_engine), (False, make_megatron)],
    ids=["tied", "untied", "megatron"],
)
def test_a_float32_head_reduces_the_mismatch(
    tied: bool, make: Callable[..., Any], tmp_path: Path, world_of_one: None
) -> None:
    folder = large_logits(tmp_path / "model", tied)
    trainers = {on: make(folder, param_dtype="bfloat16", head_dtype="float32" if on else None) for on in (0, 1)}
    found = {
        (t, g): differences(trainers[t], native(folder, bool(g)), PROMPTS, 24)[0]
        for t, g in ((0, 0), (1, 0), (0, 1), (1, 1))
    }
    assert found[1, 1] < 0.75 * found[0, 0]
    assert min(found[1, 0], found[0, 1]) > 1.3 * found[1, 1]  # both engines need it
    assert trainers[1].config_summary()["head_dtype"] == "float32"


def test_megatrons_float32_head_is_as_exact_as_fsdp2s(tmp_path: Path, world_of_one: None) -> None:
    """Against float32 of the same rounded weights and states: logits near 80 lose their rounding to steps of .5."""
    from hpcrl.engines.train.megatron.logprobs import vocabulary_logprobs

    hidden = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.randn(40, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    hidden[:, 0], weight[:, 0] = 10.0, 8.0
    targets, found, gradients = torch.arange(12), {}, {}
    for name, cast in (("float32", True), ("bfloat16", False), ("head", False)):
        states, matrix = (x.detach().clone().to(torch.float32 if cast else x.dtype) for x in (hidden, weight))
        states.requires_grad_()
        logprobs, entropies = vocabulary_logprobs(
            states,
            matrix,
            targets,
            vocab_size=37,
            temperature=0.7,
            chunk_tokens=5,
            group=dist.group.WORLD,
            entropy=True,
            float32_head=name == "head",
        )
        (logprobs.sum() - entropies.sum()).backward()
        found[name], gradients[name] = torch.stack([logprobs, entropies]).detach(), states.grad
    torch.testing.assert_close(found["head"], found["float32"], rtol=0, atol=1e-4)
    assert (found["bfloat16"] - found["float32"]).abs().max() > 0.05
    errors = {
        name: float((gradients[name].float() - gradients["float32"]).abs().max()) for name in ("head", "bfloat16")
    }
    assert errors["head"] < 0.5 * errors["bfloat16"]


@torch.no_grad()
def test_new_weights_replace_the_float32_matrix(tmp_path: Path) -> None:
    model = make_model(AutoConfig.from_pretrained(large_logits(tmp_path / "model", True)), seed=3)
    engine = native(tmp_path / "model", True)
    before = generated(engine, PROMPTS, 4).gen_logprobs
    engine.load_weights(model.state_dict().items(), version=1)
    after = generated(engine, PROMPTS, 4)
    ids = after.token_ids.view(16, 12)
    want = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None].long())[..., 0]
    got = after.gen_logprobs.view(16, 12)[:, 1:]
    answered = after.loss_mask.view(16, 12)[:, 1:]
    assert (got - want).abs()[answered].mean() < 0.1
    assert (before.view(16, 12)[:, 1:] - want).abs()[answered].mean() > 0.5
