"""Pipelines by name: each reads like pseudo-code and runs on rank 0."""

from hpcrl.pipelines.rlvr import rlvr
from hpcrl.pipelines.sft import sft

PIPELINES = {"rlvr": rlvr, "sft": sft}
