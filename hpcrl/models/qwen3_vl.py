"""Qwen3-VL (arXiv 2511.21631), dense and with experts."""

from hpcrl.models.family import Family
from hpcrl.models.vision import read_vision

FAMILY = Family(model_types=("qwen3_vl", "qwen3_vl_moe"), vision=read_vision)
