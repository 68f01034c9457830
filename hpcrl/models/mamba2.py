"""Mamba 2 (arXiv 2405.21060)."""

from hpcrl.models.family import Family

FAMILY = Family(model_types=("mamba2",), small_sizes={"num_heads": 8, "head_dim": 16, "n_groups": 1})
