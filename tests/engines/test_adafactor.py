"""Adafactor: steps as transformers', sharded like on one rank, continued bit for bit, and planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.config import ConfigError, parse
from hpcrl.launch.model_folder import inspect_model
from hpcrl.models.families import read_shape
from hpcrl.planner.trainer import checkpoint_bytes, trainer_parts
from tests.checkpoint.writing import write_files
from tests.engines.test_muon import check_steps, make, train
from tests.engines.worlds import make_model_folder, process_group, run_ranks

pytestmark = pytest.mark.numerics


def test_steps_match_transformers(tmp_path: Path) -> None:
    """Also of a stack of experts; all other weights get AdamW's step, bit for bit."""
    from transformers import Adafactor

    folder = make_model_folder("qwen3_moe", tmp_path / "model", tie_word_embeddings=False)
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "scale_parameter": False, "relative_step": False}
    with process_group(0, 1, str(tmp_path / "world")):
        matrices = check_steps(folder, "adafactor", lambda weights: Adafactor(weights, **settings), 1e-4)
    assert len(matrices) == 14 and sum(tensor.ndim == 3 for tensor in matrices.values()) == 4


def _train_and_save(folder: Path, splits: dict[Path, dict[str, Any]]) -> list[dict[str, Tensor]]:
    """The weights of each split after three steps; those of an engine that continues after the first are the same."""
    results = []
    for scratch, own in splits.items():
        engine = make(folder, "adafactor", own)
        train(engine)
        write_files(scratch, engine.snapshot())
        dist.barrier()
        found = train(engine, 2)
        other = make(folder, "adafactor", own)
        assert other.load(scratch) == []
        again = train(other, 2)
        assert all(torch.equal(found[name], again[name]) for name in found)
        results.append(found)
    return results


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one_and_resume(tmp_path: Path) -> None:
    """Two ranks, with uneven shards and experts, and copies of the model."""
    folder = make_model_folder("qwen3_moe", tmp_path / "model", hidden_size=36, num_experts=3, num_experts_per_tok=2)
    one, *of_two = (tmp_path / name for name in ("one", "two", "copies"))
    for path in (one, *of_two):
        path.mkdir()
    with process_group(0, 1, str(tmp_path / "world")):
        (wanted,) = _train_and_save(folder, {one: {}})
        before = dict(make(folder).named_weights())
        for of_rank in run_ranks(2, _train_and_save, folder, dict(zip(of_two, ({}, {"replicas": 2}), strict=True))):
            for split, found in enumerate(of_rank):
                for name, tensor in wanted.items():
                    moved = (tensor - before[name]).abs().max()
                    assert (found[name] - tensor).abs().max() < 1e-3 * moved, (split, name)
        continued = make(folder, "adafactor")
        assert "was written by 2 trainer ranks" in continued.load(of_two[0])[0]
        again = train(continued, 2)
        assert max(float((again[name] - wanted[name]).abs().max()) for name in wanted) < 1e-4


def test_the_plan_counts_vectors_of_rows_and_columns(tmp_path: Path) -> None:
    folder = make_model_folder("qwen3_moe", tmp_path / "model")
    config, shape = parse({"trainer": {"optimizer": "adafactor"}}), read_shape(inspect_model(folder).config)
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make(folder, "adafactor")
        train(engine)
        assert engine.optimizer is not None
        held = sum(t.nbytes for state in engine.optimizer.state.values() for t in state.values())
        weights = sum(parameter.nbytes for parameter in engine.shards)
    planned = {part.name: part.num_bytes for part in trainer_parts(config, shape, 1) if part.name != "gradients"}
    assert planned["optimizer"] == held
    assert checkpoint_bytes(config, shape) == weights + held


@pytest.mark.parametrize(
    ("trainer", "wrong"),
    [
        ({"engine": "megatron"}, "the megatron trainer has no adafactor; use adamw, or trainer.engine=fsdp2"),
        ({"engine": "deepspeed"}, "the deepspeed trainer has no adafactor; use adamw, or trainer.engine=fsdp2"),
        ({"fsdp2": {"tensor_parallel": 2}}, "without trainer.fsdp2.tensor_parallel; use adamw"),
        ({"fsdp2": {"cpu_offload": True}}, "without trainer.fsdp2.cpu_offload; use adamw"),
    ],
)
def test_unsupported_settings_are_refused(trainer: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({"trainer": {"optimizer": "adafactor", **trainer}})
    assert any(wrong in line for line in refused.value.problems), refused.value.problems
