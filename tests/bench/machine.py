"""What every figure is said of: processor, instruction set, cores, load.

python -m tests.bench.machine
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path


def machine() -> dict[str, object]:
    """The processor's name, the instruction set that torch uses (ATEN_CPU_CAPABILITY may ask for a smaller one), the
    cores that this process may use, and the load of the last minute."""
    import torch  # here, since a bench of start-up times must not have paid for it

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def tell(report: Mapping[str, object]) -> None:
    """Print a bench's report as one JSON line with the machine it ran on."""
    print(json.dumps({**report, **machine()}), flush=True)


if __name__ == "__main__":
    tell({"bench": "machine"})
