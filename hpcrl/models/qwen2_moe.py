"""Qwen1.5-MoE and Qwen2 (arXiv 2407.10671) with routed experts."""

from hpcrl.models.family import Family

FAMILY = Family(model_types=("qwen2_moe",), peft_experts=frozenset({"gate", "gate_proj", "up_proj", "down_proj"}))
