"""ERNIE 4.5, dense."""

from hpcrl.models.family import Family
from hpcrl.models.shape import Decoder

FAMILY = Family(
    model_types=("ernie4_5",),
    measured_layers=True,
    decoder=Decoder(
        qkv_bias_key="use_bias",
        out_bias_key="use_bias",
        mlp_bias_key="use_bias",
        adjacent_pairs=True,
        tied=True,
        head_dim=128,
    ),
    native=True,
)
