"""Multi-token prediction layers of a model's folder: exports keep or drop them, and transformers loads both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.config import TrainerConfig
from hpcrl.convert.__main__ import main as convert
from hpcrl.engines import hf_folder
from hpcrl.engines.train.fsdp2.critic import FSDP2Critic
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.launch.model_folder import inspect_model
from hpcrl.models.mtp import MTP, mtp_line, mtp_names, num_mtp_layers, with_mtp_keys
from tests.checkpoint.writing import write_files
from tests.engines.architectures import make_folder
from tests.engines.mtp import add_mtp_layers
from tests.engines.worlds import make_model_folder


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def make_engine(folder: Path, mtp: MTP = "keep", dtype: torch.dtype = torch.float32) -> FSDP2Engine:
    return FSDP2Engine(TrainerConfig(), folder, dtype=dtype, total_steps=1, mtp=mtp)


def check_loads(folder: Path, model: Path) -> None:
    """Whether transformers computes the logits of `model`, and the index names each tensor once."""
    names = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
    if (index := folder / "model.safetensors.index.json").exists():
        assert sorted(json.loads(index.read_text())["weight_map"]) == sorted(names)
    tokens = torch.arange(1, 12)[None]
    found, expected = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, model))
    with torch.no_grad():  # bits depend on where the files' tensors lie in memory
        torch.testing.assert_close(found(tokens).logits, expected(tokens).logits, atol=1e-5, rtol=1e-5)


KINDS: dict[str, str | None] = {
    "deepseek_v3": "num_nextn_predict_layers",
    "glm4_moe": "num_nextn_predict_layers",
    "qwen3_next": None,
    "qwen3_5_text": "mtp_num_hidden_layers",
}


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("family", KINDS)
def test_exports_and_conversions_have_the_folders_mtp_layers_or_none(
    family: str, world_of_one: None, tmp_path: Path
) -> None:
    model, key = make_folder(family, tmp_path / "model"), KINDS[family]
    added = add_mtp_layers(model, key)
    engine = make_engine(model)
    engine.export_hf(tmp_path / "kept")
    engine.mtp = "drop"
    engine.export_hf(tmp_path / "dropped")
    (tmp_path / "step").mkdir()
    write_files(tmp_path / "step", engine.snapshot())
    words = ["--checkpoint", str(tmp_path / "step"), "--model", str(model)]
    whole = weights(model)
    converted = {"converted": True, "small": False}
    for name, kept in ({"kept": True, "dropped": False} | converted).items():
        folder = tmp_path / name
        if name in converted:
            assert convert([*words, "--output", str(folder), "--mtp", "keep" if kept else "drop"]) == 0
        found = weights(folder)
        assert found.keys() == whole.keys() - (set() if kept else added), name
        assert all(found[n].dtype == whole[n].dtype and torch.equal(found[n], whole[n]) for n in found)
        assert key is None or config_of(folder)[key] == int(kept)
        check_loads(folder, model)


@pytest.mark.slow
def test_large_layers_become_several_files_that_the_index_names(
    world_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model_folder("qwen2", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config_of(model) | {"model_type": "qwen2"}))
    added = add_mtp_layers(model)
    monkeypatch.setattr(hf_folder, "FILE_BYTES", 1)
    make_engine(model).export_hf(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-mtp-*.safetensors"))) == len(added)
    assert weights(tmp_path / "out").keys() == weights(model).keys()
    check_loads(tmp_path / "out", model)
    make_engine(tmp_path / "out").export_hf(tmp_path / "again")
    assert weights(tmp_path / "again").keys() == weights(model).keys()


@pytest.mark.slow
def test_promised_layers_that_the_weights_lack_are_no_problem(
    world_of_one: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model_folder("glm4_moe", tmp_path / "model")
    (model / "config.json").write_text(json.dumps(config_of(model) | {"num_nextn_predict_layers": 2}))
    assert not [line for line in inspect_model(model).problems if "tokenizer" not in line]
    engine = make_engine(model)
    engine.export_hf(tmp_path / "out")
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 0
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    (tmp_path / "step").mkdir()
    write_files(tmp_path / "step", engine.snapshot())
    words = ["--checkpoint", str(tmp_path / "step"), "--model", str(model), "--output", str(tmp_path / "hf")]
    assert convert(words) == 0 and config_of(tmp_path / "hf")["num_nextn_predict_layers"] == 0
    assert f"MTP layers are left out, since {model} has no weights of them" in capsys.readouterr().err


@pytest.mark.slow
def test_critics_have_no_mtp_layers(world_of_one: None, tmp_path: Path) -> None:
    model = make_model_folder("qwen2", tmp_path / "model")
    added = add_mtp_layers(model)
    FSDP2Critic(TrainerConfig(), model, dtype=torch.float32, total_steps=1).export_hf(tmp_path / "out")
    assert not added & weights(tmp_path / "out").keys()
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 0


def test_names_of_mtp_layers() -> None:
    """Published names; the second of each pair is a tensor of the model itself."""
    config = {"num_hidden_layers": 61, "num_nextn_predict_layers": 1}
    for name, other in (
        ("model.layers.61.eh_proj.weight", "model.layers.60.mlp.gate.weight"),  # DeepSeek-V3
        ("model.layers.61.mlp.experts.0.up_proj.weight", "model.layers.6.mlp.gate.weight"),
        ("mtp.fc.weight", "model.embed_tokens.weight"),  # Qwen3-Next
        ("model.mtp_layers.0.token_layernorm.weight", "model.norm.weight"),  # MiMo
        ("model.mtp_block.0.self_attn.q_proj.weight", "model.visual.blocks.61.norm.weight"),  # ERNIE 4.5
    ):
        assert mtp_names(config, [name, other]) == [name]
    inner = {"text_config": {"num_hidden_layers": 2, "mtp_num_hidden_layers": 1}}
    assert mtp_names(inner, ["model.language_model.layers.2.a", "model.layers.1.a"]) == [
        "model.language_model.layers.2.a"
    ]
    assert mtp_names({"num_hidden_layers": 2}, ["model.layers.2.a"]) == []  # config.json names none


def test_numbers_of_mtp_layers_in_config_json() -> None:
    inner = {"model_type": "x", "text_config": {"mtp_num_hidden_layers": 1, "hidden_size": 8}}
    assert num_mtp_layers(inner) == 1 and num_mtp_layers({"num_nextn_predict_layers": None}) == 0
    assert with_mtp_keys(inner, inner, kept=False)["text_config"] == {"mtp_num_hidden_layers": 0, "hidden_size": 8}
    rewritten = {"model_type": "x", "text_config": {"hidden_size": 8}}  # by a library that omits the key
    assert with_mtp_keys(rewritten, inner, kept=True) == inner


def test_the_plan_says_what_becomes_of_mtp_layers() -> None:
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    names = ["model.layers.1.a", "model.layers.2.a"]
    assert mtp_line(config, names, "keep") == (
        "MTP layers: num_nextn_predict_layers=1, 1 tensors; not trained, copied unchanged to exports (model.mtp=keep)"
    )
    assert "left out of exports (model.mtp=drop)" in mtp_line(config, None, "drop")
    assert "but the weights have none; exports have 0" in mtp_line(config, names[:1], "keep")
    assert mtp_line({"num_hidden_layers": 2}, names, "keep") == ""
