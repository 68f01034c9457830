"""How PyTorch's allocator of a rank takes memory from a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SETTINGS = "expandable_segments:True"


def grow_segments(environ: Mapping[str, str]) -> bool:
    """Let segments grow, so that tensors of one phase fit where those of the phase before, of other sizes, were. False,
    with nothing done, without a GPU or if the user has settings of their own (VARIABLES).

    Set in the process, since as a variable it would reach processes that an engine starts: SGLang's cannot give memory
    back with it. vLLM leaves it out for the memory that it gives back.
    """
    if not torch.cuda.is_available() or any(environ.get(name) for name in VARIABLES):
        return False
    torch._C._accelerator_setAllocatorSettings(SETTINGS)
    return True
