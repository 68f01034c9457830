"""Prompts: their sources, the reading of rows, the order of drawing. Imports no torch."""

from hpcrl.data.rows import validate_sources
from hpcrl.data.sft import SFTRows, sft_rows
from hpcrl.data.source import PromptSource, epoch_order

__all__ = ["PromptSource", "SFTRows", "epoch_order", "sft_rows", "validate_sources"]
