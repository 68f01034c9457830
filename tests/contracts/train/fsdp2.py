from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrl.algorithms.interface import Objective
from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.training_engine import TrainEngine
from hpcrl.rollout.batch import Batch, MicroBatches, Norms
from tests.contracts.splits import Split

SPLITS = {
    "shard": Split(2, model={"tie_word_embeddings": False}),
    "experts": Split(2, family="deepseek_v3"),
    "context": Split(2, {"context_parallel": 2}, family="llama"),
    "tensor": Split(2, {"tensor_parallel": 2}, family="qwen3", model={"tie_word_embeddings": False}),
    "tensor, experts": Split(2, {"tensor_parallel": 2}, family="qwen3_moe"),
    "experts apart": Split(2, {"expert_parallel": 2}, family="qwen3_moe"),
    "experts apart, biases": Split(2, {"expert_parallel": 2}, family="gpt_oss"),
    "replicas": Split(4, {"replicas": 2}),
    "shard, tensor": Split(4, {"tensor_parallel": 2}),
    "shard, context": Split(4, {"context_parallel": 2}, family="qwen3_moe"),
    "shard, experts apart": Split(4, {"expert_parallel": 2}, family="deepseek_v3"),
    "tensor, context": Split(4, {"tensor_parallel": 2, "context_parallel": 2}, family="qwen3"),
    "shard, tensor, context": Split(8, {"tensor_parallel": 2, "context_parallel": 2}, family="qwen3"),
}


def factory(folder: Path) -> TrainEngine:
    config = TrainerConfig(lr=0.02, max_grad_norm=100.0, lr_schedule="linear", lr_warmup_steps=2)
    return FSDP2Engine(config, folder, dtype=torch.float32, total_steps=8)


def gradients(
    engine: FSDP2Engine, batch: Batch, micro_batches: MicroBatches, objective: Objective, norms: Norms
) -> dict[str, Tensor]:
    engine.accumulate(batch, micro_batches, objective, norms)
    found = {name.removeprefix("hf."): p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
    whole = {}
    for name, gradient in found.items():
        full = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).float().clone()
        whole[name] = engine.weights.from_parts(name, full)
    engine.discard_gradients()
    return whole
