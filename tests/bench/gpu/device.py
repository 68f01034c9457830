"""The limits that the other parts are compared with: memory bandwidth and the rate of a plain matrix product."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch

from hpcrl.workers.allocator import VARIABLES
from tests.bench.gpu.common import GB, Check, Row, median


def measure(check: Check) -> Iterator[Row]:
    """Rows `memory`, `copy` (bytes read and written) and `product` (bf16)."""
    name = torch.cuda.get_device_name() if check.on_gpu else "CPU"
    memory = torch.cuda.get_device_properties(0).total_memory if check.on_gpu else 0
    yield Row("device", "memory", memory / 2**30 or None, "GiB", note=f"{name}, torch {torch.__version__}")

    if check.on_gpu:
        grows = torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
        own = any(map(os.environ.get, VARIABLES))
        yield Row("device", "growing segments", verdict="" if own else "ok" if grows else "bad", note=f"{grows}")

    size, times = check.pick(1 << 30, 1 << 20), check.pick(10, 2)
    source = torch.ones(size, dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    yield Row("device", "copy", 2 * size / _each(check, lambda: target.copy_(source), times) / GB, "GB/s")

    size = check.pick(8192, 128)
    matrix = torch.randn(size, size, device=check.device).bfloat16()
    seconds = _each(check, lambda: matrix @ matrix, times)
    yield Row("device", "product", 2 * size**3 / seconds / 1e12, "TFLOP/s")


def _each(check: Check, work: Callable[[], object], times: int) -> float:
    """Seconds of work(), of which several are asked for at once."""

    def several() -> None:
        for _ in range(times):
            work()

    return median([check.seconds(several) / times for _ in range(4)][1:])
