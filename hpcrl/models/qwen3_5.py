"""Qwen3.5, dense and with experts: linear attention behind the tower of Qwen3-VL."""

from hpcrl.models.family import Family
from hpcrl.models.vision import read_vision

FAMILY = Family(model_types=("qwen3_5", "qwen3_5_moe"), vision=read_vision)
