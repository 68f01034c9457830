"""Where PyTorch's compiler keeps its code: a folder for each set of instructions."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def part_by_processor(environ: MutableMapping[str, str]) -> None:
    """Keep what is compiled apart by the processor's instructions, unless the user names a folder.

    The compiler (torch 2.13) does not look at the instructions when it looks for code: what was generated for AVX2 is
    compiled again for AVX-512, where it writes twice as many elements as its arrays have, and the process ends some
    time later. Nodes of several kinds may share a folder, and ATEN_CPU_CAPABILITY changes the instructions of one.
    """
    default = default_cache_dir()
    if environ.get(VARIABLE, default) == default:  # which the import of torch's compiler has set
        environ[VARIABLE] = f"{default}_{torch.backends.cpu.get_cpu_capability().lower()}"
