"""Well-known models are planned from their config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, parse
from hpcrl.launch.__main__ import main
from hpcrl.launch.resources import memory_rows, step_rows, storage_rows, trainer_rows, update_rows
from hpcrl.models.families import read_shape
from hpcrl.models.shape import CannotPlanError, LayerCache
from hpcrl.planner.generator import response_bytes, state_bytes, token_bytes
from hpcrl.planner.memory import check_sizes
from hpcrl.system.exit_codes import ExitCode
from tests.planner.published import WELL_KNOWN

LARGE: dict[str, Any] = {
    "trainer": {"param_dtype": "bfloat16", "fsdp2": {"activation_checkpointing": True}},
    "model": {"dtype": "bfloat16"},
    "generator": {"engine": "vllm", "dtype": "bfloat16"},
    "layout": {"trainer": {"num_ranks": 64}, "generator": {"num_ranks": 32, "tensor_parallel": 2}},
    "cluster": {"device": "cuda"},
    "data": {"max_prompt_tokens": 1024},
    "rollout": {"max_new_tokens": 3072, "num_prompts": 64},
}


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_a_well_known_model_is_planned_from_its_config(name: str) -> None:
    model = WELL_KNOWN[name]
    shape, config = read_shape(model.config), parse(LARGE)
    assert shape.num_parameters / 1e9 == pytest.approx(model.total, rel=0.02)
    assert shape.num_active / 1e9 == pytest.approx(model.active or model.total, rel=0.02 if model.active else 1)
    layout = RoleLayout.from_config(config)
    assert check_sizes(config, layout, shape) == []
    rows = [
        row for plan in (trainer_rows, memory_rows, update_rows, storage_rows) for row in plan(config, layout, shape)
    ]
    list(step_rows(config, layout, shape))
    assert [label for label, _ in rows if label] == ["memory", "update", "saves"]
    assert not any("cannot be planned" in text for _, text in rows)


def config_of(**changes: Any) -> Config:
    return parse(LARGE | changes)


def test_a_cache_holds_keys_of_attention_layers_and_states_of_others() -> None:
    """Qwen3-Next: 12 of 48 layers have 2 heads of 256 for keys and values; 36 have 32 states of 128 x 128, and the last
    3 inputs of a convolution of width 4 over 2 x 16 x 128 + 32 x 128 channels."""
    shape, config = read_shape(WELL_KNOWN["Qwen3-Next-80B-A3B"].config), config_of()
    assert shape.caches[3] == LayerCache(keys=2 * 2 * 256) and shape.caches[0].keys == 0
    assert token_bytes(config, shape) == 12 * 2 * 256 * 2  # one of the two heads on each rank
    states = 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
    assert state_bytes(config, shape) == states // 2
    assert response_bytes(config, shape) == 4096 * token_bytes(config, shape) + states // 2


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("DeepSeek-V2-Lite", 27 * (512 + 64)),
        ("GLM-5", 78 * (512 + 64 + 128)),  # with the indexer's keys
        ("gemma-4-31b", 50 * 2 * 16 * 256 + 10 * 2 * 4 * 512),
        ("Nemotron-3-Nano-30B-A3B", 6 * 2 * 2 * 128),
        ("LFM2-1.2B", 6 * 2 * 8 * 64),
    ],
)
def test_the_cache_of_a_token_is_counted_by_layer(name: str, numbers: int) -> None:
    whole = config_of(layout={"trainer": {"num_ranks": 64}, "generator": {"num_ranks": 32}})
    assert token_bytes(whole, read_shape(WELL_KNOWN[name].config)) == 2 * numbers


def test_a_mixture_is_read_from_its_modules() -> None:
    shape = read_shape(WELL_KNOWN["GLM-4.5-Air"].config)
    assert (shape.num_experts, shape.experts_per_token, shape.expert_size, shape.shared_size) == (128, 8, 1408, 1408)
    assert shape.expert_layers == set(range(1, 46))
    split = {p.name.removeprefix("model.layers.1."): p.split for p in shape.of_layer(1)}
    assert split["self_attn.q_proj.bias"] == "column" and split["self_attn.k_proj.weight"] == "key"
    assert split["self_attn.o_proj.weight"] == "row" and split["mlp.experts.down_proj"] == "expert"
    assert split["mlp.gate.weight"] == split["mlp.gate.e_score_correction_bias"] == "whole"


def test_a_published_folder_is_planned_by_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(WELL_KNOWN["Mixtral-8x7B"].config))
    words = ["+experiment=demo", "generator.engine=vllm", "data.max_prompt_tokens=512", "rollout.max_new_tokens=512"]
    assert main([*words, f"model.path={folder}", f"run_dir={tmp_path}/run", "dry_run=true"]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert "(mixtral, 46.7B parameters, 12.9B active)" in said and "memory  rank 1" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "no_such"}, "not known for model_type 'no_such', which transformers does not have"),
        ({"num_hidden_layers": 1001}, "num_hidden_layers in config.json is 1001, at most 1000"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers in config.json is 'many'"),
        ({"hidden_size": "wide"}, "hidden_size in config.json is 'wide'"),
        ({"hidden_act": "no_such"}, "transformers cannot build a model of this config.json .olmo.: "),
    ],
)
def test_a_config_that_transformers_cannot_read_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CannotPlanError, match=said) as raised:
        read_shape(WELL_KNOWN["OLMo-3-7B"].config | {"model_type": "olmo"} | changes)
    assert "\n" not in str(raised.value)


def test_an_infinite_number_is_read_as_transformers_writes_it() -> None:
    config = WELL_KNOWN["Nemotron-H-8B"].config
    written = config | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert read_shape(written).parameters == read_shape(config).parameters
