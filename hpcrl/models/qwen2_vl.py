"""Qwen2-VL (arXiv 2409.12191)."""

from hpcrl.models.family import Family
from hpcrl.models.vision import read_vision

FAMILY = Family(model_types=("qwen2_vl",), renamed_in_files=True, vision=read_vision, vllm_images=("qwen2_vl",))
