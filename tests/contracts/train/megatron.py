from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from hpcrl.algorithms.interface import Objective
from hpcrl.config import TrainerConfig
from hpcrl.engines.train.training_engine import TrainEngine
from hpcrl.rollout.batch import Batch, MicroBatches, Norms
from tests.contracts.splits import Split

if TYPE_CHECKING:
    from hpcrl.engines.train.megatron.engine import MegatronEngine


def factory(folder: Path) -> TrainEngine:
    from hpcrl.engines.train.megatron.engine import MegatronEngine

    config = TrainerConfig(engine="megatron", lr=0.02, max_grad_norm=100.0, lr_schedule="linear", lr_warmup_steps=2)
    return MegatronEngine(config, folder, total_steps=8)


def gradients(
    engine: MegatronEngine, batch: Batch, micro_batches: MicroBatches, objective: Objective, norms: Norms
) -> dict[str, Tensor]:
    engine.accumulate(batch, micro_batches, objective, norms, everywhere=True)
    weights = engine.weights.parameters.items()  # biases of routers have no gradients
    of_parameters = {name: weight.main_grad for name, weight in weights if hasattr(weight, "main_grad")}
    return {name: tensor.clone() for name, tensor in engine.weights.full_tensors(of_parameters, {})}


OVERLAPPED = {"overlap_gradients": True, "overlap_parameters": True}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
    },
    "max_position_embeddings": 64,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
"""Of four frequencies, the first lies between the two bounds, the others are divided."""
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6}
MIXED = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}
FOUR_LAYERS = {"num_hidden_layers": 4}
SPLITS = {
    "dp2": Split(2, {}),
    "dp2, optimizer on every rank, llama3 rope": Split(
        2, {"distributed_optimizer": False}, family="llama", model={"rope_parameters": LLAMA3}
    ),
    "dp2, overlapped": Split(2, OVERLAPPED),
    "tp2": Split(2, {"tensor_parallel": 2}),
    "tp2, one key head": Split(2, {"tensor_parallel": 2}, family="qwen3", model={"num_key_value_heads": 1}),
    "tp2 sp": Split(2, {"tensor_parallel": 2, "sequence_parallel": True}, family="qwen3"),
    "pp2": Split(2, {"pipeline_parallel": 2, "recompute": "full"}),
    "pp2 vpp2": Split(2, {"pipeline_parallel": 2, "virtual_pipeline": 2}, model=FOUR_LAYERS),
    "pp2, uneven, linear rope": Split(
        2,
        {"pipeline_parallel": 2, "account_for_loss_in_pipeline_split": True},
        family="llama",
        model={"num_hidden_layers": 3, "tie_word_embeddings": False, "rope_parameters": LINEAR},
    ),
    "pp2 vpp2, 2 + 4 layers": Split(
        2,
        {"pipeline_parallel": 2, "virtual_pipeline": 2, "num_layers_in_first_pipeline_stage": 2},
        model={"num_hidden_layers": 6},
    ),
    "cp2": Split(2, {"context_parallel": 2}, family="mistral", model={"sliding_window": 6}),
    "ep2": Split(2, {"expert_parallel": 2}, family="qwen3_moe"),
    "ep2, overlapped": Split(2, OVERLAPPED | {"expert_parallel": 2}, family="qwen3_moe"),
    "etp2, mixtral": Split(2, {"expert_tensor_parallel": 2}, family="mixtral"),
    "tp2 ep2, shared expert behind a gate": Split(2, MIXED, family="qwen2_moe"),
    "tp2 ep2, bias per expert": Split(2, MIXED, family="glm4_moe", model={"use_qk_norm": True, "attention_bias": True}),
    "tp2 ep2, latent attention": Split(2, MIXED, family="deepseek_v3"),
    "tp2 ep2, sinks": Split(2, MIXED, family="gpt_oss"),
    "tp2 ep2, delta rule": Split(2, MIXED, family="qwen3_next"),
    "pp2, delta rule": Split(2, {"pipeline_parallel": 2, "recompute": "full"}, family="qwen3_next"),
    "tp2, delta rule with separate projections": Split(2, {"tensor_parallel": 2}, family="qwen3_5_text"),
    "cp2, sinks": Split(2, {"context_parallel": 2}, family="gpt_oss"),
    "ep2, best expert of a group": Split(2, {"expert_parallel": 2}, family="deepseek_v2"),
    "cp2, latent attention": Split(2, {"context_parallel": 2}, family="deepseek_v3", model=YARN),
    "pp2, moonlight": Split(2, {"pipeline_parallel": 2}, family="deepseek_v3", model=MOONLIGHT),
    "tp2 sp pp2": Split(
        4, {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2}, model=FOUR_LAYERS
    ),
    "tp2 cp2": Split(4, {"tensor_parallel": 2, "context_parallel": 2}),
    "ep2 etp2": Split(4, {"expert_parallel": 2, "expert_tensor_parallel": 2}, family="qwen3_moe"),
    "tp2 sp pp2 vpp2 dp2, overlapped": Split(
        8,
        OVERLAPPED | {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2, "virtual_pipeline": 2},
        model=FOUR_LAYERS,
    ),
    "tp2 sp pp2 vpp2 ep2": Split(
        8,
        {
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "pipeline_parallel": 2,
            "virtual_pipeline": 2,
            "expert_parallel": 2,
        },
        family="qwen3_moe",
        model=FOUR_LAYERS,
    ),
}
