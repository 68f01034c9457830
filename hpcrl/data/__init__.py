"""Prompts: sources, reading of rows, order of drawing. Does not import torch."""

from hpcrl.data.answers import SFTRows, sft_rows
from hpcrl.data.head_rows import HeadRows, head_row_reader
from hpcrl.data.row_kinds import READERS
from hpcrl.data.rows import check_answers, check_shares, parse_row, read_splits
from hpcrl.data.source import PromptSource, epoch_order

__all__ = [
    "READERS",
    "HeadRows",
    "PromptSource",
    "SFTRows",
    "check_answers",
    "check_shares",
    "epoch_order",
    "head_row_reader",
    "parse_row",
    "read_splits",
    "sft_rows",
]
