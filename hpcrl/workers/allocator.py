"""How a rank's PyTorch allocator reserves GPU memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SETTINGS = "expandable_segments:True"


def grow_segments(environ: Mapping[str, str]) -> bool:
    """Use expandable segments, so a phase's tensors can reuse memory of the previous phase, whose tensors had other
    sizes. Does nothing and returns False without a GPU or if the user has allocator settings (VARIABLES).

    The option is set only in this process. Processes that an engine starts would inherit an environment variable, and
    SGLang's processes cannot release memory in expandable segments. vLLM does not use them for memory that it releases.
    """
    if not torch.cuda.is_available() or any(environ.get(name) for name in VARIABLES):
        return False
    torch._C._accelerator_setAllocatorSettings(SETTINGS)
    return True
