"""Models that a training engine cannot train are recognised by their config.json before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from hpcrl.config import parse
from hpcrl.config.abilities import check_trainable
from hpcrl.models.rope import rope_types
from hpcrl.models.windows import attention_kinds
from tests.test_launch import CONFIG, SHORT, refused, write_model

AT = ("model", "path")
DYNAMIC: dict[str, Any] = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}


def texts(trainer: dict[str, Any], model: dict[str, Any], **others: Any) -> list[str]:
    return [problem.text for problem in check_trainable(parse({"trainer": trainer, **others}), model, AT)]


@pytest.mark.parametrize(
    ("trainer", "model", "wrong"),
    [
        ({"engine": "megatron"}, {"model_type": "mamba"}, "megatron trainer trains qwen2, .*, not mamba; use "),
        (
            {"engine": "fsdp2"},
            {"model_type": "qwen9"},
            r"trains decoders of transformers, and 5\.\S+ has none of .*=qwen9$",
        ),
        ({"engine": "deepspeed"}, {"model_type": "bert_"}, r"decoders of transformers, and \S+ has none of .*=bert_$"),
        (
            {"engine": "megatron"},
            {"model_type": "llama"} | DYNAMIC,
            "no rope_type=dynamic, only default, linear, llama3, yarn; ",
        ),
        (
            {"engine": "megatron"},
            {"model_type": "qwen3", "attention_bias": True} | DYNAMIC,
            "has no attention_bias=true and has no rope_type=dynamic, only .*; use trainer.engine=fsdp2 or deepspeed$",
        ),
        (
            {"engine": "fsdp2", "fsdp2": {"context_parallel": 2}},
            {"model_type": "llama"} | DYNAMIC,
            r"fsdp2 trainer cannot pack it \(rope_type=dynamic .*\), which trainer.fsdp2.context_parallel=2 needs; use "
            "trainer.engine=deepspeed$",
        ),
        (
            {"engine": "deepspeed", "deepspeed": {"packing": "require"}},
            {"model_type": "llama"} | DYNAMIC,
            "which trainer.deepspeed.packing=require needs; use trainer.engine=fsdp2$",
        ),
    ],
)
def test_a_missing_feature_is_named_with_the_engine_that_supports_it(
    trainer: dict[str, Any], model: dict[str, Any], wrong: str
) -> None:
    (text,) = texts(trainer, model)
    assert text.startswith(f"model.path: the {trainer['engine']} trainer ")
    assert re.search(wrong, text), text


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed", "megatron"])
def test_trainable_models_are_not_refused(engine: str) -> None:
    assert texts({"engine": engine}, CONFIG) == []
    if engine != "megatron":
        assert texts({"engine": engine}, {"model_type": "mamba"} | DYNAMIC) == []
    assert texts({"engine": engine}, {"model_type": "mamba"}, debug="fake") == []  # no engine has a model


def test_a_start_is_refused_from_the_config_only(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", config=CONFIG | DYNAMIC)
    lines = refused(f"model.path={model}", *SHORT, "trainer.engine=megatron", at=tmp_path)
    assert any("the megatron trainer has no rope_type=dynamic" in line for line in lines), lines


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "llama", "mistral"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sliding_window": 8},
        {"sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
    ],
)
def test_attention_kinds_of_layers_match_transformers(family: str, settings: dict[str, Any]) -> None:
    if family in ("llama", "mistral"):
        settings = {key: value for key, value in settings.items() if key == "sliding_window"}
    hf: Any = AutoConfig.for_model(family, num_hidden_layers=4, **settings)
    window = getattr(hf, "sliding_window", None) if family != "llama" else None
    wanted = set(getattr(hf, "layer_types", None) or [f"{'full' if window is None else 'sliding'}_attention"])
    assert attention_kinds({"model_type": family, "num_hidden_layers": 4, **settings}) == wanted


@pytest.mark.parametrize(
    ("settings", "types"),
    [
        ({}, {"default"}),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {"dynamic"}),
        ({"rope_scaling": {"type": "longrope"}}, {"longrope"}),
        ({"rope_scaling": {"type": "su", "long_factor": [1.0]}}, {"longrope"}),
        ({"rope_parameters": None, "rope_scaling": None}, {"default"}),
        ({"rope_parameters": {"full": {"rope_type": "yarn"}, "local": {"rope_type": "dynamic"}}}, {"yarn", "dynamic"}),
    ],
)
def test_rope_types_are_read_from_the_config(settings: dict[str, Any], types: set[str]) -> None:
    assert rope_types(settings) == types
