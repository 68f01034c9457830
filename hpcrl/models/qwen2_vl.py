"""Qwen2-VL (arXiv 2409.12191)."""

from hpcrl.models.family import Family
from hpcrl.models.vision import read_vision

NAMES = ("qwen2_vl",)
FAMILY = Family(model_types=NAMES, renamed_in_files=True, vision=read_vision, vllm_images=NAMES, sglang_images=NAMES)
