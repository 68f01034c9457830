"""AdamW with moments in 8 bits: against the formula and bitsandbytes' own optimizer, the same bits on any number of
ranks, and continued bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.config import ConfigError, LoRAConfig, parse
from hpcrl.config.abilities import check_installed
from hpcrl.launch.model_folder import inspect_model
from hpcrl.models.families import read_shape
from hpcrl.planner.trainer import checkpoint_bytes, trainer_parts
from hpcrl.spec import kinds
from tests.checkpoint.writing import write_files
from tests.engines.test_muon import LENGTHS, make, train
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, process_group, run_ranks

pytestmark = pytest.mark.numerics


def make_folder(folder: Path, family: str = "qwen2") -> Path:
    """Rows of 256 numbers, of 288 that are not a multiple of a block, and of 96 that are shorter than one."""
    sizes = {"hidden_size": 288, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return make_model_folder(family, folder, **sizes, head_dim=24)


def in_8_bits(engine: Any) -> list[str]:
    states = {name: engine.optimizer.state.get(p, {}) for name, p in engine.model.hf.named_parameters()}
    return [name for name, state in states.items() if "exp_avg_scale" in state]


@pytest.mark.slow
def test_steps_match_bitsandbytes_and_are_close_to_adamw(tmp_path: Path) -> None:
    """Parameters without 8-bit moments get AdamW's step, bit for bit."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    folder, batch = make_folder(tmp_path / "model"), make_batch(LENGTHS)
    with process_group(0, 1, str(tmp_path / "world")):
        engine, adamw = make(folder, "adamw8bit"), make(folder, "adamw")
        before = dict(engine.named_weights())
        whole_blocks = [name for name, tensor in before.items() if "layers" in name and tensor.shape[-1] == 256]
        reference = {name: torch.nn.Parameter(before[name].clone()) for name in whole_blocks}
        theirs = bitsandbytes.optim.AdamW8bit(reference.values(), lr=1e-2, weight_decay=0.1)
        for step in range(3):
            for own in (engine, adamw):
                own.accumulate(batch, [[0, 1, 2, 3]], Weighted(0.7), norms_of(batch))
            for name, parameter in reference.items():
                parameter.grad = engine.weights[name].grad.clone()  # type: ignore[union-attr]
            engine._update()
            adamw._update()
            theirs.step()
            weights, others = dict(engine.named_weights()), dict(adamw.named_weights())
            assert all(torch.equal(weights[name], parameter) for name, parameter in reference.items())
            if step == 0:
                special = in_8_bits(engine)
                assert set(whole_blocks) < set(special) and not any("embed" in name for name in special)
                assert all(torch.equal(weights[name], others[name]) for name in weights if name not in special)
        assert len(special) == 12 and len(whole_blocks) == 2
        for name in special:
            difference = (weights[name] - others[name]).norm() / (others[name] - before[name]).norm()
            assert 0 < difference < 0.1, (name, difference)


@pytest.mark.slow
def test_adapters_are_trained_with_8_bit_moments(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make(folder, "adamw8bit", lora=LoRAConfig(rank=16))
        train(engine)
        assert in_8_bits(engine)[0] == "model.layers.0.self_attn.q_proj.lora_A.weight"


def _train_and_save(folder: Path, splits: dict[Path, dict[str, Any]]) -> list[dict[str, Tensor]]:
    """The weights of each split after two steps; an engine that continues after the first has the same."""
    results = []
    for scratch, own in splits.items():
        engine = make(folder, "adamw8bit", own=own)
        train(engine)
        write_files(scratch, engine.snapshot())
        dist.barrier()
        found = train(engine)
        other = make(folder, "adamw8bit", own=own)
        assert other.load(scratch) == []
        again = train(other)
        assert all(torch.equal(found[name], again[name]) for name in found)
        results.append(found)
    return results


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_divide_the_quantised_blocks(tmp_path: Path) -> None:
    """Two ranks, with experts, copies of the model, and state on the host; then one rank continues."""
    folder = make_folder(tmp_path / "model", "qwen3_moe")
    own = {"one": {}, "two": {}, "copies": {"replicas": 2}, "host": {"cpu_offload": True}}
    paths = {tmp_path / name: section for name, section in own.items()}
    for path in paths:
        path.mkdir()
    one, *others = paths
    with process_group(0, 1, str(tmp_path / "world")):
        (wanted,) = _train_and_save(folder, {one: {}})
        before = dict(make(folder).named_weights())
        for of_rank in run_ranks(2, _train_and_save, folder, {path: paths[path] for path in others}):
            for split, found in zip(others, of_rank, strict=True):
                for name, tensor in wanted.items():
                    difference = (found[name] - tensor).norm() / (tensor - before[name]).norm()
                    assert difference < 0.02, (split, name, difference)
        continued = make(folder, "adamw8bit")
        assert "was written by 2 trainer ranks" in continued.load(others[0])[0]
        weights = train(continued)
        for name, tensor in wanted.items():
            assert (weights[name] - tensor).norm() < 0.02 * (tensor - before[name]).norm(), name


@pytest.mark.slow
def test_the_plan_counts_codes_and_scales(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "qwen3_moe")
    config, shape = parse({"trainer": {"optimizer": "adamw8bit"}}), read_shape(inspect_model(folder).config)
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make(folder, "adamw8bit")
        train(engine)
        assert engine.optimizer is not None
        held = sum(t.nbytes for state in engine.optimizer.state.values() for t in state.values())
        weights = sum(parameter.nbytes for parameter in engine.shards)
    planned = {part.name: part.num_bytes for part in trainer_parts(config, shape, 1) if part.name != "gradients"}
    assert planned["optimizer"] == held < 2 * weights
    assert checkpoint_bytes(config, shape) == weights + held


@pytest.mark.parametrize(
    ("trainer", "wrong"),
    [
        ({"engine": "megatron"}, "the megatron trainer has no adamw8bit; use adamw, or trainer.engine=fsdp2"),
        ({"engine": "deepspeed"}, "the deepspeed trainer has no adamw8bit; use adamw, or trainer.engine=fsdp2"),
        ({"fsdp2": {"tensor_parallel": 2}}, "adamw8bit needs whole rows, without trainer.fsdp2.tensor_parallel"),
    ],
)
def test_unsupported_settings_are_refused(trainer: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({"trainer": {"optimizer": "adamw8bit", **trainer}})
    assert any(wrong in line for line in refused.value.problems), refused.value.problems


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse({"trainer": {"optimizer": "adamw8bit"}})
    assert check_installed(config) == []
    monkeypatch.setattr(kinds, "_installed", lambda module: module != "bitsandbytes")
    (problem,) = check_installed(config)
    assert problem.text.startswith("trainer.optimizer: adamw8bit is not installed; ")
    assert problem.text.endswith("constraints.txt 'bitsandbytes==0.50.*'")
    assert check_installed(parse({})) == []
