"""Every family of the Megatron engine: its checkpoints become the model, and the model becomes a checkpoint that it
loads. FSDP2's checkpoints of further families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hpcrl.config import TrainerConfig
from hpcrl.convert.__main__ import main
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from tests.checkpoint.writing import write_files
from tests.engines.architectures import make_folder
from tests.engines.mtp import add_mtp_layers
from tests.engines.mtp_reference import folder_with_mtp
from tests.engines.worlds import make_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "mixtral": {"num_hidden_layers": 3},
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True},
    "gpt_oss": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {"num_hidden_layers": 3, "layer_types": [*(["linear_attention"] * 2), "full_attention"]},
    "deepseek_v2": {"num_hidden_layers": 3},
    "deepseek_v3": {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
}


def convert(*words: Any) -> None:
    assert main([str(word) for word in words]) == 0


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def check_equal(folder: Path, origin: Path) -> None:
    found, expected = weights(folder), weights(origin)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_megatrons_checkpoints_convert_both_ways(family: str, world_of_one: None, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from hpcrl.engines.train.megatron.engine import MegatronEngine

    model = make_model_folder(family, tmp_path / "model", **FAMILIES[family])
    engine = MegatronEngine(TrainerConfig(engine="megatron"), model, total_steps=1)
    (tmp_path / "step").mkdir()
    write_files(tmp_path / "step", engine.snapshot())
    convert("--checkpoint", tmp_path / "step", "--model", model, "--output", tmp_path / "hf", "--verify")
    check_equal(tmp_path / "hf", model)

    convert("--to", "megatron", "--checkpoint", model, "--output", tmp_path / "dist", "--verify")
    convert("--checkpoint", tmp_path / "dist", "--output", tmp_path / "back", "--shard-gb", "3e-5")
    check_equal(tmp_path / "back", model)

    expected = {name: tensor.clone() for name, tensor in engine.weights.parameters.items()}
    with torch.no_grad():
        for tensor in engine.weights.parameters.values():
            tensor.fill_(7.0)
    load_as_megatron_does(engine, tmp_path / "dist")
    vocabulary = len(weights(model)["model.embed_tokens.weight"])  # the paddings differ
    found = engine.weights.parameters
    assert all(torch.equal(found[name][:vocabulary], tensor[:vocabulary]) for name, tensor in expected.items())


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_mtp_layers_pass_through_training_and_conversion(family: str, world_of_one: None, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from hpcrl.engines.train.megatron.engine import MegatronEngine

    model = make_model_folder(family, tmp_path / "model", **FAMILIES[family])
    added = add_mtp_layers(model)
    settings = TrainerConfig(engine="megatron")
    engine = MegatronEngine(settings, model, total_steps=1)
    engine.export_hf(tmp_path / "kept")
    check_equal(tmp_path / "kept", model)
    assert key_of(tmp_path / "kept") == 1
    engine.mtp = "drop"
    engine.export_hf(tmp_path / "dropped")
    assert weights(tmp_path / "dropped").keys() == weights(model).keys() - added and key_of(tmp_path / "dropped") == 0

    (tmp_path / "step").mkdir()
    write_files(tmp_path / "step", engine.snapshot())
    convert("--checkpoint", tmp_path / "step", "--model", model, "--output", tmp_path / "hf", "--verify")
    check_equal(tmp_path / "hf", model)
    convert("--checkpoint", tmp_path / "step", "--model", model, "--output", tmp_path / "small", "--mtp", "drop")
    assert weights(tmp_path / "small").keys() == weights(model).keys() - added and key_of(tmp_path / "small") == 0


def test_stacked_experts_of_mtp_layers_say_nothing_of_the_policys(world_of_one: None, tmp_path: Path) -> None:
    """Exports of models like Qwen3.6: the policy's experts are separate, and those of the MTP layer one tensor."""
    pytest.importorskip("megatron.core")
    from hpcrl.engines.train.megatron.engine import MegatronEngine

    model = folder_with_mtp("qwen3_5_moe_text", tmp_path / "model", stacked=True)
    MegatronEngine(TrainerConfig(engine="megatron"), model, total_steps=1).export_hf(tmp_path / "out")
    check_equal(tmp_path / "out", model)


def key_of(folder: Path) -> int:
    number: int = json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"]
    return number


def load_as_megatron_does(engine: Any, folder: Path) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling

    (chunk,) = engine.chunks
    metadata = torch.load(folder / "common.pt", weights_only=False)["content_metadata"]
    if not metadata["non_homogeneous_layers"]:  # a list, which the engine always gives, means layers of several kinds
        chunk.module.decoder.config.moe_layer_freq = 1
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    wanted = chunk.module.sharded_state_dict(metadata=metadata | {"dp_cp_group": group})
    state = dist_checkpointing.load(wanted, str(folder), strict=StrictHandling.LOG_UNEXPECTED)
    chunk.module.load_state_dict(state, strict=False)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "qwen3_next"])
def test_fsdp2s_checkpoints_become_the_model(family: str, world_of_one: None, tmp_path: Path) -> None:
    """As the engine writes them: experts in one tensor, with moments. DeepSpeed's checkpoints have the same format."""
    model = make_folder(family, tmp_path / "model")
    engine = FSDP2Engine(TrainerConfig(), model, dtype=torch.float32, total_steps=1)
    (tmp_path / "step").mkdir()
    write_files(tmp_path / "step", engine.snapshot())
    convert("--checkpoint", tmp_path / "step", "--model", model, "--output", tmp_path / "hf", "--verify")
    check_equal(tmp_path / "hf", model)
