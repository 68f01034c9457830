"""Keep vLLM's kernels within the instructions that oneDNN may use."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch


def follow_onednn_limit(environ: Mapping[str, str] = os.environ) -> None:
    """Hide AMX in this process if ONEDNN_MAX_CPU_ISA excludes it. vLLM checks only the processor, and its bfloat16
    matmul would end the process with SIGABRT, because PyTorch's brgemm needs AMX in oneDNN."""
    limit = (environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or "ALL").upper()
    if limit not in {"ALL", "DEFAULT"} and "AMX" not in limit:
        torch.cpu._is_amx_tile_supported = _is_hidden


def _is_hidden() -> bool:
    return False
