"""Seed-OSS."""

from hpcrl.models.family import Family
from hpcrl.models.shape import Decoder

FAMILY = Family(
    model_types=("seed_oss",),
    measured_layers=True,
    decoder=Decoder(
        qkv_bias=True,
        qkv_bias_key="attention_bias",
        out_bias_key="attention_out_bias",
        mlp_bias_key="mlp_bias",
        head_dim=128,
    ),
    native=True,
)
