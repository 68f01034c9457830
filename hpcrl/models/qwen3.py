"""Qwen3 (arXiv 2505.09388), dense."""

from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.shape import Decoder

FAMILY = Family(
    model_types=("qwen3",),
    decoder=Decoder(reads_bias=True, qk_norm=True, windows="by layer", window_switch=True, head_dim=128),
    native=True,
    megatron=MegatronModel(biases=("attention_bias",)),
    vllm_slices=True,
)
