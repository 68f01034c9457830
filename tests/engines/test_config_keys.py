"""Engines that build models themselves read every key of a config.json or refuse the model: if an engine ignored a key
that transformers reads, it would train or sample from a different model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(300)]

PROMPTS = ([5, 6, 7], list(range(20, 41)), [9] * 12)
NEW_TOKENS = 12
OF_TEXT = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class"}
OF_FILES = {"model_type", "architectures", "transformers_version", "dtype", "_name_or_path", "is_encoder_decoder"}
"""Keys that no forward has."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
TOGETHER: dict[str, dict[str, Any]] = {
    "theta": {"rope_parameters": ROPE | {"rope_theta": 500.0}},
    "theta, old form": {"rope_theta": 500.0},
    "linear": {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}},
    "linear, old form": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_parameters": ROPE | LLAMA3},
    "llama3, part of a head": {"rope_parameters": ROPE | LLAMA3 | {"partial_rotary_factor": 0.5}},
    "yarn": {"rope_parameters": ROPE | YARN},
    "yarn, other mscale": {"rope_parameters": ROPE | YARN | {"mscale": 0.7}},
    "yarn, not truncated": {"rope_parameters": ROPE | YARN | {"truncate": False}},
    "yarn with a factor": {"rope_parameters": ROPE | YARN | {"attention_factor": 1.5}},
    "dynamic": {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}},
    "a window": {"sliding_window": 5},
    "windows": {"sliding_window": 5, "layer_types": [SLIDING] * 2},  # makes a mistral a ministral
    "windows in use": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0},
    "windows above": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "windows here and there": {"sliding_window": 5, "use_sliding_window": True, "layer_types": [SLIDING, FULL]},
    "chunks": {"attention_chunk_size": 5, "layer_types": ["chunked_attention"] * 2},
    "alpha": {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0, "alpha": 50.0}},
    "caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0},
    "few experts": {"num_experts": 1, "n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
    "relu": {"hidden_act": "relu", "hidden_activation": "relu"},
    "swish": {"hidden_act": "swish"},
}
"""Keys that go together, or that no config class shows."""
FAMILIES = {
    "megatron": (
        *("gpt_oss", "qwen3_moe", "deepseek_v3", "glm4_moe", "llama", "qwen2", "qwen3", "mistral", "qwen2_moe"),
        *("mixtral", "deepseek_v2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    ),
    "native": (
        *("qwen3_moe", "gemma2", "qwen2", "qwen3", "llama", "mistral", "ministral", "phi3", "gemma3_text"),
        *("qwen2_5_vl", "gpt_oss", "qwen2_moe", "mixtral", "glm4_moe", "seed_oss", "olmo2", "olmo3"),
        *("ernie4_5", "hunyuan_v1_dense", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe"),
    ),
}  # fmt: skip
IN_TEXT_CONFIG = {"qwen3_5", "qwen3_5_moe"}
"""Families whose decoders have the keys of another one, in text_config."""
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "shared_expert_intermediate_size": 20,
}  # fmt: skip
SAMPLE = {
    "megatron": ("gpt_oss", "glm4_moe", "deepseek_v3"),
    "native": ("qwen3_moe", "gemma2", "gpt_oss", "glm4_moe"),
}


def changes(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, keys) of models that differ from a config in one key, or in a set of keys from TOGETHER."""
    for key, value in config.items():
        if key in OF_TEXT | OF_FILES:
            continue
        others: list[Any] = []
        match value:
            case bool():
                others = [not value]
            case float():
                others = [1.7 * value or 0.3]
            case int():
                others = [2 * value or 1, value // 2]
            case str():
                others = ["gelu" if key.startswith("hidden_act") else "other"]
            case list():
                others = [value[:1], [0]]
            case None:
                others = [True, 2]
        yield from ((f"{key}={other!r}", {key: other}) for other in others)
    yield from TOGETHER.items()


def make(family: str, folder: Path, keys: dict[str, Any]) -> Any:
    """transformers' model of a folder, None if there is none or it fails."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.engines.worlds import make_model_folder

    own = {"phi3": {"pad_token_id": 0}}.get(family, DELTA if family.startswith(("qwen3_next", "qwen3_5")) else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make_model_folder(family, folder, **copy.deepcopy(own | keys))  # transformers adds keys to sections
            model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
            ids = torch.tensor([PROMPTS[1]])
            return model if model.eval()(ids).logits.isfinite().all() else None
        except Exception:  # any error of a model's code about sizes that do not fit
            return None


def of_transformers(model: Any, rows: list[list[int]]) -> Any:
    """Log-probs of each row's tokens but the first, one after the other."""
    import torch

    with torch.no_grad():
        found = [
            model(torch.tensor([row]), use_cache=False)
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(1, torch.tensor([row[1:]]).T)
            for row in rows
        ]
    return torch.cat(found)[:, 0]


def megatron(folder: Path, model: Any) -> float:
    """Largest difference of the engine's log-probs from the model's."""
    from hpcrl.config import TrainerConfig
    from hpcrl.engines.train.megatron.engine import MegatronEngine
    from tests.engines.worlds import make_batch

    engine = MegatronEngine(TrainerConfig(engine="megatron"), folder, total_steps=1, trainable=False)
    batch = make_batch((9, 41, 14), num_prompt_tokens=1)
    got = engine.logprobs(batch, [[0, 1, 2]], 1.0)[batch.loss_mask]
    rows = [row.tolist() for row in batch.token_ids.split(batch.lengths.tolist())]
    return float((got - of_transformers(model, rows)).abs().max())


def native(folder: Path, model: Any) -> float:
    """As megatron(), for responses that the engine samples."""
    import torch

    from hpcrl.engines.gen.generation_engine import Request, SamplingParams
    from hpcrl.engines.gen.native.engine import NativeEngine

    engine = NativeEngine(folder, max_num_seqs=4, max_length=64, dtype=torch.float32)
    engine.add([Request(i, ids, SamplingParams(NEW_TOKENS, ignore_eos=True), seed=i) for i, ids in enumerate(PROMPTS)])
    outputs = {output.id: output for _ in range(NEW_TOKENS + 1) for output in engine.step(NEW_TOKENS)}
    worst = 0.0
    for i, ids in enumerate(PROMPTS):
        want = of_transformers(model, [[*ids, *outputs[i].token_ids.tolist()]])[len(ids) - 1 :].numpy()
        worst = max(worst, float(np.abs(want - outputs[i].gen_logprobs).max()))
    return worst


ENGINES: dict[str, Callable[[Path, Any], float]] = {"megatron": megatron, "native": native}


def check(engine: str, family: str, scratch: Path) -> None:
    import json

    assert make(family, scratch / "as_is", {}) is not None
    wrong, equal = [], []
    for number, (name, keys) in enumerate(changes(json.loads((scratch / "as_is/config.json").read_text()))):
        folder = scratch / str(number)
        if (model := make(family, folder, keys)) is None:
            continue
        try:
            difference = ENGINES[engine](folder, model)
        except ValueError as refusal:
            assert "\n" not in str(refusal) and str(folder) in str(refusal), refusal
            continue
        (equal if difference < 5e-5 else wrong).append(f"{name}: {difference:.1e}")
    assert not wrong
    assert len(equal) > 20, equal


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "family"), [(engine, family) for engine in SAMPLE for family in SAMPLE[engine]])
def test_every_config_key_is_read_or_refused(engine: str, family: str, world_of_one: None, tmp_path: Path) -> None:
    if engine == "megatron":
        pytest.importorskip("megatron.core")
    check(engine, family, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("engine", "family"),
    [(engine, family) for engine in FAMILIES for family in FAMILIES[engine] if family not in SAMPLE[engine]],
)
def test_other_families_keys_are_read_or_refused(engine: str, family: str, world_of_one: None, tmp_path: Path) -> None:
    check(engine, family, tmp_path)


def test_no_supported_family_is_missing() -> None:
    from hpcrl.models.families import MEGATRON, NATIVE

    assert set(FAMILIES["megatron"]) == set(MEGATRON)
    assert set(FAMILIES["native"]) == set(NATIVE) - IN_TEXT_CONFIG
