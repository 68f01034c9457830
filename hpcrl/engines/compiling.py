"""Separate cache folders of PyTorch's compiler for each instruction set."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def part_by_processor(environ: MutableMapping[str, str]) -> None:
    """Use a separate cache folder for the processor's instruction set, unless the user sets a folder.

    The compiler (torch 2.13) ignores the instruction set when it looks up cached code. Code that was generated for AVX2
    and is compiled again for AVX-512 writes twice as many elements as its arrays have, and the process crashes later.
    Different nodes may share a folder, and ATEN_CPU_CAPABILITY changes the instruction set.
    """
    default = default_cache_dir()
    if environ.get(VARIABLE, default) == default:  # the import of torch's compiler may have set the default
        environ[VARIABLE] = f"{default}_{torch.backends.cpu.get_cpu_capability().lower()}"
