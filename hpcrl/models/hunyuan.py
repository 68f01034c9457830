"""Hunyuan, dense: query and key heads are normalised after the rotary embedding."""

from hpcrl.models.family import Family
from hpcrl.models.shape import Decoder

FAMILY = Family(
    model_types=("hunyuan_v1_dense",),
    measured_layers=True,
    decoder=Decoder(
        reads_bias=True,
        qk_norm=True,
        qk_norm_names=("query_layernorm", "key_layernorm"),
        qk_norm_last=True,
        rope_alpha=True,
    ),
    native=True,
)
