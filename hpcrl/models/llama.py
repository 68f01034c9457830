"""Llama 1 to 3 (arXiv 2407.21783), and models with its architecture."""

from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.shape import Decoder

FAMILY = Family(
    model_types=("llama",),
    decoder=Decoder(reads_bias=True, mlp_bias_key="mlp_bias"),
    native=True,
    megatron=MegatronModel(biases=("attention_bias", "mlp_bias")),
    vllm_slices=True,
)
