"""Checkpoints of Megatron-Core become the HF models they were made from, bit for bit, and back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.config import TrainerConfig
from hpcrl.convert.__main__ import main
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from tests.checkpoint.writing import write_files
from tests.convert.megatron_writing import BACK, CASES, tokens
from tests.convert.models import MODELS, make_models
from tests.engines.worlds import make_model_folder, process_group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(360),
    pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed (extra: megatron)"),
]
PROGRAM = Path(__file__).with_name("megatron_writing.py")
LOGIT_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which four ranks wrote all cases; see megatron_writing.py."""
    folder = tmp_path_factory.mktemp("world")
    make_models(folder / "models")
    for name in BACK:
        convert("--to", "megatron", "--checkpoint", folder / "models" / name, "--output", folder / "back" / name)
    (folder / "logits").mkdir()
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(folder / "log", "w") as log:  # no pipe: processes that outlive a failed rank would hold it open
        command = [sys.executable, str(PROGRAM), str(folder)]
        process = subprocess.Popen(command, env=environ, start_new_session=True, stdout=log, stderr=log)
        try:
            code = process.wait(300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, (folder / "log").read_text()[-4000:]
    return folder


def convert(*words: Any) -> None:
    assert main([str(word) for word in words]) == 0


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def largest_difference(model: Path, logits: Path) -> float:
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = hf(tokens()).logits
    return float((torch.load(logits)[..., : expected.shape[-1]] - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_a_megatron_checkpoint_becomes_the_model(world: Path, name: str, tmp_path: Path) -> None:
    origin = world / "models" / CASES[name].model
    convert("--checkpoint", world / name, "--model", origin, "--output", tmp_path / "hf", "--verify")
    expected, found = weights(origin), weights(tmp_path / "hf")
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (origin / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "deepseek_v3"])
def test_megatron_computes_the_logits_of_transformers(world: Path, name: str, tmp_path: Path) -> None:
    logits = world / "logits" / f"{name}.pt"
    assert largest_difference(world / "models" / name, logits) < LOGIT_TOLERANCE
    # Swapped rows of two heads are noticed; a round trip would not notice them.
    changed = weights(world / "models" / name)
    query = changed["model.layers.0.self_attn.q_proj.weight"]
    size = query.shape[0] // 4
    query[:size], query[size : 2 * size] = query[size : 2 * size].clone(), query[:size].clone()
    (tmp_path / "config.json").write_bytes((world / "models" / name / "config.json").read_bytes())
    save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
    assert largest_difference(tmp_path, logits) > 100 * LOGIT_TOLERANCE


@pytest.mark.parametrize("name", ["qwen2", "qwen2_tied", "qwen3_moe", "qwen3_moe_mixed", "deepseek_v3"])
def test_a_model_converts_to_megatron_and_back(world: Path, name: str, tmp_path: Path) -> None:
    """Without --model: the checkpoint has config.json and tokenizer. The fixture `world` has tested that Megatron loads
    it."""
    origin = world / "models" / name
    convert("--to", "megatron", "--checkpoint", origin, "--output", tmp_path / "dist", "--shard-gb", "2e-5", "--verify")
    assert len(list((tmp_path / "dist").glob("*.distcp"))) > 2
    convert("--checkpoint", tmp_path / "dist", "--output", tmp_path / "hf", "--shard-gb", "3e-5", "--threads", 3)
    expected, found = weights(origin), weights(tmp_path / "hf")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for key, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(key), expected[key])
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_moe", "olmo2"])
def test_an_fsdp2_checkpoint_becomes_the_model(world: Path, name: str, tmp_path: Path) -> None:
    """As the engine writes it: the weights of an fp32 trainer, experts in one tensor, moments beside them. OLMo 2 has
    no table of Megatron's names; see tests/engines/test_megatron_conversion.py for other families."""
    model = world / "models" / name
    if not model.exists():
        model = make_model_folder(name, tmp_path / name)
    with process_group(0, 1, str(tmp_path / "store")):
        engine = FSDP2Engine(TrainerConfig(), model, dtype=torch.float32, total_steps=1)
        (tmp_path / "step").mkdir()
        write_files(tmp_path / "step", engine.snapshot())
    convert("--checkpoint", tmp_path / "step", "--model", model, "--output", tmp_path / "hf", "--verify")
    expected, found = weights(model), weights(tmp_path / "hf")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_weights_are_converted_to_another_dtype(world: Path, tmp_path: Path) -> None:
    origin = world / "models" / "deepseek_v3"
    convert("--checkpoint", world / "latent", "--model", origin, "--output", tmp_path / "hf", "--dtype", "bf16")
    found, expected = weights(tmp_path / "hf"), weights(origin)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {key for key in found if found[key].dtype == torch.float32} == {bias}
    assert all(torch.equal(found[key], expected[key].to(found[key].dtype)) for key in expected)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("case", "changes", "text"),
    [
        ("tp2", {"num_hidden_layers": 3}, r"has shape \[2, 64, 32\], config.json requires \[3, 64, 32\]"),
        ("indexed", {"num_hidden_layers": 3}, r"another model: no decoder.layers.2.input_layernorm.weight"),
        ("indexed", {"num_hidden_layers": 1}, r"no place for decoder.layers.1.mlp.linear_fc1.layer_norm_weight"),
        ("tp2", {"tie_word_embeddings": True}, r"config.json has no place for output_layer.weight"),
        ("pp2_tied", {"tie_word_embeddings": False}, r"no output_layer.weight"),
        ("ep2", {"num_local_experts": 8, "num_experts": 8}, r"has shape \[2, 4, 48, 32\].*requires \[2, 8, 48, 32\]"),
        ("tp2", {"vocab_size": 500}, r"has 128 rows, but config.json vocab_size=500: .* another model"),
        ("tp2", {"model_type": "gpt2"}, r"model_type 'gpt2' has no table .*\(qwen2, .* have\)"),
    ],
)
def test_a_different_model_is_refused(
    world: Path, case: str, changes: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((world / "models" / CASES[case].model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    words = ["--checkpoint", world / case, "--model", tmp_path, "--output", tmp_path / "hf"]
    assert main([str(word) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(text, line), line
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.fixture
def one(world: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of a checkpoint, to be damaged."""
    shutil.copytree(world / "tp2", tmp_path / "one")
    shutil.copyfile(world / "models" / "qwen2" / "config.json", tmp_path / "one" / "config.json")
    yield tmp_path / "one"


def refusal(folder: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["--checkpoint", str(folder), "--output", str(output)]) == 2
    assert not output.exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_damaged_shards_are_named(one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = max(one.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = shard.read_bytes()
    shard.write_bytes(content[:-5000])
    assert f"{shard} is damaged: it has {len(content) - 5000} bytes" in refusal(one, tmp_path / "hf", capsys)
    shard.write_bytes(b"\0" * len(content))
    assert f"{shard} is damaged at byte " in refusal(one, tmp_path / "hf", capsys)
    shard.unlink()
    assert f"{shard} is missing: {one} is incomplete" in refusal(one, tmp_path / "hf", capsys)
    (one / ".metadata").write_bytes(b"\x80\x04nonsense")
    assert f"{one}/.metadata is damaged" in refusal(one, tmp_path / "hf", capsys)
    (one / ".metadata").unlink()
    assert f"{one} is not a checkpoint: no .metadata in it or below it" in refusal(one, tmp_path / "hf", capsys)


def test_a_flipped_byte_is_found_by_its_checksum(one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = max(one.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    convert("--checkpoint", one, "--output", tmp_path / "unchecked")
    words = ["--checkpoint", str(one), "--output", str(tmp_path / "hf"), "--verify"]
    assert main(words) == 2 and not (tmp_path / "hf").exists()
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"{shard} is damaged between byte " in told and "its checksum is wrong" in told, told


def test_a_checkpoint_is_found_below_a_folder(one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As verl nests it, next to the model's configuration; several checkpoints are refused."""
    step = tmp_path / "global_step_10"
    shutil.copytree(one, step / "actor" / "model" / "dist_ckpt", ignore=shutil.ignore_patterns("config.json"))
    (step / "actor" / "model" / "huggingface").mkdir()
    shutil.copyfile(one / "config.json", step / "actor" / "model" / "huggingface" / "config.json")
    convert("--checkpoint", step, "--output", tmp_path / "hf")
    assert "reading " + str(step / "actor" / "model" / "dist_ckpt") in capsys.readouterr().err
    shutil.copytree(one, tmp_path / "roll" / "iter_3" / "dist_model")  # ROLL's nesting
    (tmp_path / "roll" / "iter_3" / "dist_model" / "config.json").rename(tmp_path / "roll" / "iter_3" / "config.json")
    convert("--checkpoint", tmp_path / "roll", "--output", tmp_path / "of_roll")
    shutil.copytree(step / "actor", step / "critic")
    assert "has 2 checkpoints below it: name one of " in refusal(step, tmp_path / "other", capsys)
    (tmp_path / "fsdp" / "actor").mkdir(parents=True)
    (tmp_path / "fsdp" / "actor" / "model_world_size_2_rank_0.pt").touch()
    assert "python -m verl.model_merger converts" in refusal(tmp_path / "fsdp", tmp_path / "other", capsys)
