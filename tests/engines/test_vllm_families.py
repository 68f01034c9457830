"""Families of vLLM: the names and layouts of weights, and log-probs after updates."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.engines.gen.generation_engine import Request, SamplingParams
from tests.contracts.gen.vllm import leave_groups
from tests.engines.vllm_families import CHANGES, make_folder, named

needs_vllm = pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed (extra: vllm)")


@pytest.fixture(autouse=True)
def no_groups_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "slow" in request.keywords or "soak" in request.keywords:
        leave_groups()


@pytest.mark.parametrize("family", CHANGES)
def test_weights_are_published_as_transformers_saves_them(family: str, tmp_path: Path) -> None:
    """The names and layouts that vLLM reads from files."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from hpcrl.engines.gen.vllm.published import Published

    saved = load_file(make_folder(family, tmp_path) / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    conversion = Published(model.config.model_type)
    made = [pair for name, tensor in named(model).items() for pair in conversion.of(name, tensor)]
    assert sorted(name for name, _ in made) == sorted(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in made)


def test_missing_values_of_a_router_are_those_of_transformers(tmp_path: Path) -> None:
    from hpcrl.engines.gen.vllm.published import config_overrides

    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3", "scoring_func": "other"}')
    assert config_overrides(tmp_path) == {"topk_method": "noaux_tc"}
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v2"}')
    assert config_overrides(tmp_path) == config_overrides(tmp_path / "none") == {}


class Direct(torch.nn.Module):
    """A loader that copies, as GptOssModel's does, beside one that uses weight loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("scale", torch.zeros(2))

    def load_weights(self, named: Any, part: bool = False) -> None:
        values = dict(named)
        self.sinks.data[:1].copy_(values["sinks"][:1]) if part else self.sinks.data.copy_(values["sinks"])
        self.scale.copy_(values["scale"])


@needs_vllm
@pytest.mark.slow
def test_weights_that_a_loader_copies_directly_are_kept() -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    from hpcrl.engines.gen.vllm.direct_copies import DirectCopies

    model, layer = torch.nn.Sequential(Direct()), 0
    layerwise.record_metadata_for_reloading(model)
    places = [tensor.data_ptr() for tensor in model[layer].state_dict().values()]
    new = {"sinks": torch.tensor([1.0, 2.0]), "scale": torch.tensor([3.0, 4.0])}
    for kept in (False, True):
        layerwise.initialize_layerwise_reload(model)
        if kept:
            with DirectCopies(model):
                model[layer].load_weights(new.items())
        else:
            model[layer].load_weights(new.items())
        layerwise.finalize_layerwise_reload(model, None)
        state = model[layer].state_dict()
        assert [tensor.data_ptr() for tensor in state.values()] == places, "CUDA graphs read the same memory"
        assert all(torch.equal(state[name], new[name]) == kept for name in new)
    layerwise.initialize_layerwise_reload(model)
    with pytest.raises(ValueError, match=r"a part of Direct\.sinks, which is lost"), DirectCopies(model):
        model[layer].load_weights(new.items(), part=True)


BLOCKS = {"block_size": 32}


def make_engine(folder: Path, **settings: Any) -> Any:
    from hpcrl.engines.gen.vllm.engine import VLLMEngine

    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_length": 64, "cache_bytes": 1 << 25, "load": False}
    return VLLMEngine(folder, **sizes | {"dtype": "float32"} | settings)


def changed(folder: Path, version: int) -> Any:
    """The model of this folder with other weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(version)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # transformers' other CPU attention has no soft cap
    for tensor in named(model).values():
        tensor.mul_(1 + 0.3 * torch.rand_like(tensor))
    return model


ASKED = [Request(i, [(11 * i + k) % 90 for k in range(20 + 9 * i)], SamplingParams(12), seed=i) for i in range(3)]


def answers(engine: Any) -> dict[int, Any]:
    engine.add(ASKED)
    found: dict[int, Any] = {}
    while engine.progress():
        found |= {output.id: output for output in engine.step(4)}
    return found


@torch.no_grad()
def logprobs(model: Any, found: dict[int, Any]) -> np.ndarray:
    """Of all response tokens."""
    rows = []
    for request in ASKED:
        ids = torch.tensor([[*request.prompt_ids, *found[request.id].token_ids.tolist()]])
        values = model(ids).logits[0, :-1].float().log_softmax(-1)
        rows.append(values.gather(1, ids[0, 1:, None])[len(request.prompt_ids) - 1 :, 0])
    return torch.cat(rows).numpy()


def generated(found: dict[int, Any]) -> np.ndarray:
    return np.concatenate([found[request.id].gen_logprobs for request in ASKED])


REPRESENTATIVES = ("gpt_oss", "deepseek_v3", "granitemoehybrid", "ernie4_5_moe")
"""A loader that copies directly, with biased experts and sinks; latent attention, whose queries have three dimensions;
a hybrid with experts, and prompts longer than a block; a correction bias of experts without groups."""
RUN = (
    *(
        "deepseek_v2",
        "ernie4_5",
        "falcon_h1",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "gemma4_text experts",
        "glm4_moe_lite",
    ),
    *("granitemoe", "hunyuan_v1_dense", "lfm2", "lfm2_moe", "llama4_text", "minimax_m2"),
    *("nemotron_h", "olmo2", "seed_oss"),
)
TOLERANCE = {"glm4_moe_lite": 5e-5, "granitemoe": 5e-5}
"""Where log-probs differ by more than 2e-5: the norms of latents have eps=rms_norm_eps in vLLM, and 1e-6 in
transformers; rounding."""
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""vLLM's kernel has blocks of another size."""
ROUNDED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""vLLM's gated delta rule on a CPU computes in bfloat16."""
REFUSED = {
    "nemotron_h experts": "is_act_and_mul=False is supported only for CUDA",
}
"""What vLLM's CPU build says."""


@needs_vllm
@pytest.mark.numerics
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(family, marks=pytest.mark.slow) for family in REPRESENTATIVES),
        *(pytest.param(family, marks=pytest.mark.soak) for family in RUN),
    ],
)
def test_log_probs_after_updates_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = make_folder(family, tmp_path)
    engine = make_engine(folder, options={} if family in LATENT else BLOCKS)
    for version in range(2):
        model = changed(folder, version)
        engine.load_weights(iter(named(model).items()), version)
        for _ in ("computed prompts", "prompts whose first block is cached"):
            found = answers(engine)
            np.testing.assert_allclose(generated(found), logprobs(model, found), atol=TOLERANCE.get(family, 2e-5))
    engine.close()


def require_torchvision(family: str) -> None:
    """vLLM's module of Qwen3.5 imports it, also for texts."""
    if "qwen3_5" in family:
        pytest.importorskip("torchvision")


@needs_vllm
@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ROUNDED)
def test_updates_fill_every_parameter(family: str, tmp_path: Path) -> None:
    """load_weights() raises an error for a parameter without a weight."""
    require_torchvision(family)
    folder = make_folder(family, tmp_path)
    engine = make_engine(folder, options=BLOCKS)
    weights = named(changed(folder, 0))
    engine.load_weights(iter(weights.items()), 0)
    last = list(weights)[-1]
    with pytest.raises(ValueError, match=r"no weights for|weights are missing"):
        engine.load_weights(((name, tensor) for name, tensor in weights.items() if name != last), 1)
    engine.close()


@needs_vllm
@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ROUNDED)
def test_bf16_log_probs_after_updates_differ_only_by_rounding(family: str, tmp_path: Path) -> None:
    """The median token, because rounding changes the chosen experts of some tokens, in transformers as in vLLM."""
    require_torchvision(family)
    folder = make_folder(family, tmp_path)
    engine = make_engine(folder, dtype="bfloat16")
    for version in range(2):
        exact, rounded = changed(folder, version), changed(folder, version).to(torch.bfloat16)
        engine.load_weights(iter(named(exact).items()), version)
        found = answers(engine)
        own, full, half = generated(found), logprobs(exact, found), logprobs(rounded, found)
        floor = np.median(abs(half - full))
        assert 0 < np.median(abs(own - full)) < 1.5 * floor and np.median(abs(own - half)) < 1.5 * floor
    engine.close()


@needs_vllm
@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", REFUSED)
def test_families_that_the_cpu_build_refuses(family: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=REFUSED[family]):
        answers(make_engine(make_folder(family, tmp_path)))
