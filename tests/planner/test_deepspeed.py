"""The plan of DeepSpeed ranks against tensors of the real engine, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from hpcrl.checkpoint.writer import SharedFile
from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, TrainerConfig, parse
from hpcrl.engines.train.deepspeed import memory
from hpcrl.engines.train.deepspeed.spec import BUCKET_NUMBERS, DeepSpeedConfig
from hpcrl.launch.model_folder import inspect_model
from hpcrl.models.families import read_shape
from hpcrl.models.shape import ModelShape
from hpcrl.planner.trainer import checkpoint_bytes, reference_parts, trainer_parts
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, run_ranks
from tests.planner.measuring import bytes_of, least_peak_bytes

if TYPE_CHECKING:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

STAGES = (1, 2, 3)
ODD = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12, "vocab_size": 101}


def shape_of(folder: Path) -> ModelShape:
    return read_shape(inspect_model(folder).config)


def make_engine(folder: Path, dtype: str, trainable: bool = True, **keys: Any) -> ZeroEngine:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

    config = TrainerConfig(lr=1e-3, logits_chunk_tokens=16, param_dtype=dtype)
    own = DeepSpeedConfig(**keys)
    return ZeroEngine(config, folder, zero=own, dtype=torch.float32, total_steps=10, trainable=trainable)


def config_of(dtype: str, **keys: Any) -> Config:
    return parse({"trainer": {"engine": "deepspeed", "param_dtype": dtype, "deepspeed": keys}})


def held(folder: Path, dtype: str) -> list[dict[str, int]]:
    """Part -> bytes of this rank, for each stage."""
    from hpcrl.engines.train.deepspeed import zero

    found = []
    for stage in STAGES:
        engine = make_engine(folder, dtype, zero_stage=stage)
        held_by = engine.model.optimizer
        assert engine.optimizer is not None
        states = engine.optimizer.state.values()
        weights = held_by.lp_param_buffer if stage == 3 else torch.cat(held_by.bit16_groups_flat)
        files = engine.snapshot().values()
        found.append(
            {
                "weights": bytes_of(weights),
                "fp32 weights": sum(map(bytes_of, zero.flat_weights(held_by))),
                "optimizer": sum(bytes_of(value) for state in states for value in state.values()),
                "snapshot": sum(len(file.buffer) for file in files if isinstance(file, SharedFile)),
            }
        )
    return found


def planned(folder: Path, dtype: str, stage: int, num_ranks: int) -> dict[str, int]:
    parts = trainer_parts(config_of(dtype, zero_stage=stage), shape_of(folder), num_ranks)
    names = ("weights", "fp32 weights", "optimizer")
    return {name: next(part.num_bytes for part in parts if part.name == name) for name in names}


def test_planned_constants_match_deepspeed() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # the engine first: it avoids importing mlflow

    own = DeepSpeedZeroConfig(stage=3)
    assert own.reduce_bucket_size == own.allgather_bucket_size == BUCKET_NUMBERS
    assert own.max_live_parameters == own.max_reuse_distance == own.sub_group_size == memory.LIVE_NUMBERS
    assert own.param_persistence_threshold == memory.PERSISTENT_NUMBERS


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("qwen2", "bfloat16"), ("qwen3_moe", "float32")])
def test_one_rank_holds_exactly_the_planned_bytes(family: str, dtype: str, tmp_path: Path, world_of_one: None) -> None:
    folder = make_model_folder(family, tmp_path / family, **ODD)
    for stage, found in zip(STAGES, held(folder, dtype), strict=True):
        del found["snapshot"]
        assert found == planned(folder, dtype, stage, 1), stage
        assert found != planned(folder, dtype, stage, 2)  # negative control


@pytest.mark.slow
def test_two_ranks_hold_exactly_the_planned_bytes(tmp_path: Path) -> None:
    folder = make_model_folder("qwen2", tmp_path / "qwen2", **ODD)
    shape = shape_of(folder)
    first, second = run_ranks(2, held, folder, "bfloat16")
    for stage, one, other in zip(STAGES, first, second, strict=True):
        written = one.pop("snapshot") + other.pop("snapshot")
        assert one == other == planned(folder, "bfloat16", stage, 2), stage
        header = 2048  # each tensor is an archive of its own
        size = checkpoint_bytes(config_of("bfloat16"), shape)
        assert size <= written <= size + header * 4 * len(shape.parameters)


def test_offloaded_files_are_a_line_of_the_plan(tmp_path: Path) -> None:
    """By hand: 12 bytes of optimizer state and fp32 weights, 2 of bfloat16 weights; moments are not in host memory."""
    shape = shape_of(make_model_folder("qwen2", tmp_path / "qwen2", hidden_size=32, vocab_size=64))
    where = {"nvme_path": "/scratch"}
    both = config_of("bfloat16", offload_optimizer="nvme", offload_parameters="nvme", **where)
    one = config_of("bfloat16", zero_stage=2, offload_optimizer="nvme", **where)
    assert memory.disk_bytes(both, shape, 1) == 14 * shape.num_parameters
    assert memory.disk_bytes(one, shape, 1) == 12 * shape.num_parameters
    assert memory.disk_bytes(config_of("bfloat16", offload_optimizer="cpu"), shape, 1) == 0
    (row,) = memory.PLAN.rows(both, RoleLayout.from_config(both), shape)
    assert row[0] == "on disk" and row[1].endswith(" GiB per trainer rank in /scratch on its node")
    on_host = {part.name: part.num_bytes for part in trainer_parts(both, shape, 1) if part.on_host}
    assert on_host["fp32 weights"] == 4 * shape.num_parameters and on_host["optimizer"] < 10


TALL: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 96, "intermediate_size": 256, "head_dim": 24}


def step_peak(folder: Path, trace: Path, dtype: str, keys: dict[str, Any]) -> int:
    """Most bytes of a train step of two micro-batches beyond weights and optimizer state."""
    engine = make_engine(folder, dtype, **keys)
    batch = make_batch([64] * 16, num_prompt_tokens=1)
    args = (batch, [list(range(8)), list(range(8, 16))], Weighted(), norms_of(batch))
    engine.train_step(*args)
    return least_peak_bytes(lambda: engine.train_step(*args), trace / f"trace{dist.get_rank()}.json")


def planned_peak(folder: Path, dtype: str, num_ranks: int, keys: dict[str, Any]) -> int:
    config = parse(
        {
            "trainer": {
                "engine": "deepspeed",
                "logits_chunk_tokens": 16,
                "max_tokens_per_micro_batch": 8 * 64,
                "param_dtype": dtype,
                "deepspeed": keys,
            },
            "rollout": {"max_new_tokens": 63, "num_prompts": 2 * num_ranks, "group_size": 8},
            "data": {"max_prompt_tokens": 1},
        }
    )
    parts = trainer_parts(config, shape_of(folder), num_ranks)
    phases = ("train", "update")
    return max(sum(p.num_bytes for p in parts if phase in p.during and set(p.during) <= {*phases}) for phase in phases)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), [(1, "bfloat16"), (2, "float32"), (3, "bfloat16")])
def test_a_step_needs_no_more_memory_than_planned(stage: int, dtype: str, tmp_path: Path, world_of_one: None) -> None:
    folder = make_model_folder("qwen3", tmp_path / "qwen3", vocab_size=1000, **TALL)
    keys = {"zero_stage": stage}
    ratio = planned_peak(folder, dtype, 1, keys) / step_peak(folder, tmp_path, dtype, keys)
    assert 1.0 <= ratio <= 1.3


def test_a_frozen_engine_under_zero_3_holds_a_shard(tmp_path: Path, world_of_one: None) -> None:
    folder = make_model_folder("qwen2", tmp_path / "qwen2", **ODD)
    for stage in (1, 3):
        engine = make_engine(folder, "bfloat16", trainable=False, zero_stage=stage)
        weights = sum(bytes_of(getattr(p, "ds_tensor", p)) for p in engine.module.parameters())
        parts = reference_parts(config_of("bfloat16", zero_stage=stage), shape_of(folder), 1)
        assert weights == parts[0].num_bytes
