from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcrl.algorithms.interface import Objective
from hpcrl.config import TrainerConfig
from hpcrl.engines.train.training_engine import TrainEngine
from hpcrl.rollout.batch import Batch, MicroBatches, Norms
from tests.contracts.splits import Split

if TYPE_CHECKING:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

OFFLOAD: dict[str, Any] = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
DISK = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "nvme_path": "/var/tmp"}
SPLITS = {
    "zero1": Split(2, {"zero_stage": 1}, model={"tie_word_embeddings": False}),
    "zero2": Split(2, {"zero_stage": 2}),
    "zero3": Split(2, {"zero_stage": 3}, family="qwen3_moe"),
    "zero3_offload": Split(2, {"zero_stage": 3, **OFFLOAD}),
    "zero3_disk": Split(2, {"zero_stage": 3, **DISK}),
    "zero2, four ranks": Split(4, {"zero_stage": 2}),
    "zero3, many ranks": Split(8, {"zero_stage": 3}, family="qwen3_moe"),
}


def factory(folder: Path) -> TrainEngine:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

    config = TrainerConfig(lr=0.02, max_grad_norm=100.0, lr_schedule="linear", lr_warmup_steps=2)
    return ZeroEngine(config, folder, dtype=torch.float32, total_steps=8)


def gradients(
    engine: ZeroEngine, batch: Batch, micro_batches: MicroBatches, objective: Objective, norms: Norms
) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_grad  # after the engine, which keeps it from importing mlflow

    engine.accumulate(batch, micro_batches, objective, norms)
    trained = {name: p for name, p in engine.module.hf.named_parameters() if p.requires_grad}
    found = {name: safe_get_full_grad(p).float().clone() for name, p in trained.items()}
    engine.discard_gradients()
    return found
