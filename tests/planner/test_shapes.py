"""Names and shapes of all parameters against the model that transformers builds on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.launch.model_folder import inspect_model
from hpcrl.models.families import read_shape
from hpcrl.models.shape import CannotPlanError
from tests.engines.worlds import LATENT
from tests.planner.models import PUBLISHED, published


def built(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the parameters of the real model."""
    settings = {key: value for key, value in config.items() if key != "model_type"}
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(AutoConfig.for_model(config["model_type"], **settings))
    biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *biases)}


def planned(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in read_shape(config).parameters}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_of_published_models_match_transformers(name: str) -> None:
    config, count = PUBLISHED[name]
    assert planned(config) == built(config)
    assert read_shape(config).num_parameters == count


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3", "attention_bias": True},
        {"model_type": "qwen3"},  # head_dim from the family
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama", "num_key_value_heads": None},
        {"model_type": "gemma2", "attention_bias": True, "tie_word_embeddings": False},
        {"model_type": "qwen3_moe", "num_experts": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "deepseek_v3", **LATENT},
        {"model_type": "deepseek_v2", **LATENT},
        {"model_type": "deepseek_v2", "num_experts_per_tok": 2, "mlp_bias": True},
        {"model_type": "qwen2_moe"},
        {"model_type": "qwen2_moe", "qkv_bias": False, "mlp_only_layers": [1], "num_experts": 6},
        {"model_type": "mixtral"},
        {"model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True},
        {"model_type": "glm4_moe", "first_k_dense_replace": 0, "n_shared_experts": 2, "n_routed_experts": 6},
        {"model_type": "gpt_oss"},
        {"model_type": "olmo2", "attention_bias": True},
        {"model_type": "olmo3"},
        {"model_type": "seed_oss", "attention_out_bias": True, "mlp_bias": True},
        {"model_type": "ernie4_5", "use_bias": True},
        {"model_type": "hunyuan_v1_dense", "head_dim": 16, "attention_bias": True},
        {"model_type": "gpt_oss", "attention_bias": False, "num_local_experts": 6},
        {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": None, "attention_bias": True},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_options_that_change_shapes_match_transformers(changes: dict[str, Any]) -> None:
    config = published("", 64, 4, 4, 2, 96, 128) | changes
    assert planned(config) == built(config)


def test_shapes_of_deepseek_v3_match_transformers() -> None:
    """With transformers' defaults, which are its sizes; its layer that predicts further tokens is not counted."""
    config = published("deepseek_v3", 7168, 61, 128, 128, 18432, 129280)
    assert planned(config) == built(config)
    shape = read_shape(config)
    assert shape.num_parameters == 671_026_419_200 and 37e9 < shape.num_active < 38e9


def test_the_comparison_detects_a_wrong_size() -> None:
    """Negative control: the comparison detects one layer, one head and one tied matrix."""
    config, _ = PUBLISHED["Qwen2.5-0.5B"]
    real = built(config)
    for change in ({"num_hidden_layers": 25}, {"num_key_value_heads": 1}, {"tie_word_embeddings": False}):
        assert planned(config | change) != real


@pytest.mark.parametrize(
    "architecture", ["qwen2", "qwen3", "qwen3_moe", "llama", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"]
)
def test_planned_shapes_of_the_tiny_model_match_the_made_one(architecture: Any, tmp_path: Path) -> None:
    tiny = TinyModel(architecture=architecture, tie_word_embeddings=architecture != "llama")
    make_tiny_model(tiny, tmp_path / "tiny")
    written = inspect_model(tmp_path / "tiny")
    assert planned(tiny.hf_config()) == built(written.config) == planned(written.config)


def test_active_parameters_of_a_mixture_of_experts() -> None:
    """Qwen3-30B-A3B: 120 of the 128 experts of each of 48 layers are idle."""
    config, count = PUBLISHED["Qwen3-30B-A3B"]
    assert read_shape(config).num_active == count - 48 * 120 * 3 * 2048 * 768
    config, count = PUBLISHED["Llama-3-8B"]
    assert read_shape(config).num_active == count


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "no_such"}, "model_type 'no_such'"),
        ({"hidden_size": None}, "hidden_size in config.json is None"),
        ({"vocab_size": "many"}, "vocab_size in config.json is 'many'"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers in config.json is 1000000, at most 1000 is supported"),
        ({"num_hidden_layers": 10**400}, r"num_hidden_layers in config.json is 10+\.\.\.0+, at most 1000"),
        ({"vocab_size": 2**31}, "vocab_size in config.json is 2147483648, at most 2147483647 is supported"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": "1"}, "mlp_only_layers in config.json is '1', a list"),
        ({"model_type": "qwen2_5_vl", "text_config": [1]}, "text_config in config.json is not an object"),
    ],
)
def test_models_that_cannot_be_planned_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CannotPlanError, match=said):
        read_shape(PUBLISHED["Llama-3-8B"][0] | change)
