"""Kimi Linear (arXiv 2510.26692): Kimi Delta Attention, and latent attention without rotary embeddings."""

from hpcrl.models.family import Family

FAMILY = Family(
    model_types=("kimi_linear",),
    small_sizes={"linear_num_heads": 4, "linear_head_dim": 16, "linear_attn_config": {}},
)
