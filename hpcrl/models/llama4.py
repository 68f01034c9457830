"""Llama 4."""

from hpcrl.models.family import Family

FAMILY = Family(model_types=("llama4", "llama4_text"), reads_positions_from_cache=True)
