"""Qwen3 (arXiv 2505.09388) with routed experts."""

from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.shape import Decoder

FAMILY = Family(
    model_types=("qwen3_moe",),
    decoder=Decoder(reads_bias=True, qk_norm=True, experts=True, windows="all", window_switch=True),
    native=True,
    megatron=MegatronModel(biases=("attention_bias",)),
    vllm_slices=True,
)
