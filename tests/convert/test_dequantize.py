"""Models with quantised weights become models in bfloat16: values against transformers' own dequantisation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpcrl.convert.__main__ import main
from hpcrl.convert.dequantize import QuantisedWeights
from hpcrl.system.exit_codes import ExitCode

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def write(folder: Path, tensors: dict[str, Tensor], quantisation: dict[str, Any] | None, **config: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    kind = {} if quantisation is None else {"quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **kind, **config}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def in_float8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The matrix in 8 bits, and its scales per block."""
    rows, columns = weight.shape
    grid = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    stored = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            grid[i, j] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / grid[i, j]).to(torch.float8_e4m3fn)
    return stored, grid


def convert(source: Path, output: Path, *options: str) -> int:
    return main(["--checkpoint", str(source), "--output", str(output), *options])


def test_a_folder_with_blocks_of_8_bits_is_transformers_dequantisation(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    sizes = {"model.layers.0.mlp.up_proj": (256, 384), "model.layers.61.eh_proj": (128, 384), "odd": (300, 200)}
    weights = {name: torch.randn(size) for name, size in sizes.items()}
    quantised = {name: in_float8(weight, (128, 128)) for name, weight in weights.items()}
    tensors = {f"{name}.weight": stored for name, (stored, _) in quantised.items()}
    tensors |= {f"{name}.weight_scale_inv": scales for name, (_, scales) in quantised.items()}
    bias = torch.randn(8)
    plain = {"model.norm.weight": torch.randn(200).bfloat16(), "model.layers.3.mlp.gate.e_score_correction_bias": bias}
    source = write(tmp_path / "fp8", tensors | plain, FP8, torch_dtype="bfloat16")
    assert convert(source, tmp_path / "bf16", "--verify") == ExitCode.DONE
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert found.keys() == {f"{name}.weight" for name in sizes} | plain.keys()
    referee = Fp8Dequantize(SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=[128, 128])))
    for name, (stored, scales) in quantised.items():
        if name != "odd":  # which transformers refuses
            assert torch.equal(found[f"{name}.weight"], referee._dequantize_one(stored, scales, torch.bfloat16))
        assert (found[f"{name}.weight"].float() - weights[name]).abs().max() < 0.2
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert config == {"model_type": "llama", "torch_dtype": "bfloat16"}
    assert (tmp_path / "bf16" / "tokenizer.json").is_file()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (6, 1), (6,)], ids=str)
def test_scales_may_be_per_tensor_or_row(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    stored = torch.arange(24.0).view(6, 4).to(torch.float8_e4m3fn)
    exponents = torch.arange(126, 132, dtype=torch.uint8)[: max(1, torch.Size(shape).numel())].view(shape)
    factors = (exponents - 127.0).exp2()
    scales = exponents if dtype == torch.uint8 else factors.to(dtype)
    tensors = {"a.weight": stored, "a.weight_scale": scales, "a.input_scale": torch.ones(1)}
    kind = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    source = QuantisedWeights(write(tmp_path / "fp8", tensors, kind), {"quantization_config": kind})
    wanted = (stored.float() * (factors.view(-1, 1) if factors.numel() > 1 else factors)).bfloat16()
    assert source.shapes == {"a.weight": (6, 4)}
    assert torch.equal(source.read("a.weight", 0, 6), wanted)
    assert torch.equal(source.read("a.weight", 2, 5), wanted[2:5])


def test_experts_of_4_bits_are_transformers_dequantisation(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 6, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 131, (3, 6, 2), generator=generator, dtype=torch.uint8)
    at = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{at}_blocks": blocks, f"{at}_scales": scales, f"{at}_bias": torch.ones(3, 6).bfloat16()}
    source = write(tmp_path / "mxfp4", tensors, MXFP4, model_type="gpt_oss")
    assert convert(source, tmp_path / "bf16") == ExitCode.DONE
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert found.keys() == {at, f"{at}_bias"}
    assert torch.equal(found[at], convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16))
    assert found[at].shape == (3, 64, 6)  # experts, in, out


def test_folders_that_are_not_dequantised_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, scales = in_float8(torch.randn(300, 200), (128, 128))
    good = {"a.weight": stored, "a.weight_scale_inv": scales}
    cases = {
        "plain": (good, None, "a model in HF layout already, without quantised weights; --to megatron"),
        "awq": (good, {"quant_method": "awq"}, "quant_method='awq'; only fp8, mxfp4, compressed-tensors are converted"),
        "alone": ({"a.weight": stored}, FP8, "a.weight is torch.float8_e4m3fn, and no scales belong to it"),
        "grid": (
            good | {"a.weight_scale_inv": scales[:2]},
            FP8,
            r"the scales of a.weight [300, 200] have shape [2, 2], which fits neither weight_block_size=[128, 128]",
        ),
    }
    for name, (tensors, kind, text) in cases.items():
        source = write(tmp_path / name, tensors, kind)
        assert convert(source, tmp_path / "out") == ExitCode.BAD_INPUT
        said = capsys.readouterr().err
        assert text in said and said.count("\n") == 1, said
        assert not (tmp_path / "out").exists()
    assert main(["--to", "megatron", "--checkpoint", str(tmp_path / "grid"), "--output", str(tmp_path / "out")]) == 2
    command = f"python -m hpcrl.convert --checkpoint {tmp_path}/grid --output {tmp_path}/grid-bf16"
    assert f"has quantised weights; first convert them to bfloat16: {command}\n" in capsys.readouterr().err
