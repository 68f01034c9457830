"""How a rank's PyTorch allocator reserves GPU memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SETTINGS = "expandable_segments:True"


def grow_segments(environ: Mapping[str, str]) -> bool:
    """Use expandable segments, so a phase's tensors can reuse memory of the previous phase, whose tensors had other
    sizes. Does nothing and returns False without a GPU or if the user has allocator settings (VARIABLES).

    Set in the process, since processes that an engine starts would inherit a variable: with it, SGLang's processes
    cannot release memory. vLLM does not use it for the memory that it releases.
    """
    if not torch.cuda.is_available() or any(environ.get(name) for name in VARIABLES):
        return False
    torch._C._accelerator_setAllocatorSettings(SETTINGS)
    return True
