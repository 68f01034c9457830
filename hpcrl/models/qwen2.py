"""Qwen2 and Qwen2.5 (arXiv 2412.15115)."""

from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.shape import Decoder

FAMILY = Family(
    model_types=("qwen2",),
    decoder=Decoder(qkv_bias=True, windows="by layer", window_switch=True),
    native=True,
    megatron=MegatronModel(),
    vllm_slices=True,
)
