"""Rates of copies to host memory that is fresh, or kept from the last time: how an engine's state leaves a GPU.

    python -m tests.bench.moving [--mib N] [--tensors N] [--repeats N]

On a GPU from its memory, and what is kept is registered with CUDA; else from the host's own. GB/s, the best of the
repeats after one that makes the memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from hpcrl.engines.train.offloading import HostMemory
from tests.bench.machine import tell

State = dict[int, Tensor]


def best_rate(state: State, go: Callable[[State], State], back: Callable[[State], State], repeats: int) -> float:
    """GB/s of the fastest go(state), each followed by back() of what it returned."""
    back(go(state))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        away = go(state)
        seconds.append(time.perf_counter() - start)
        back(away)
        del away
    return round(sum(tensor.nbytes for tensor in state.values()) / min(seconds) / 1e9, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="of all tensors together")
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    words = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numbers = (words.mib << 18) // words.tensors
    state = {number: torch.ones(numbers, device=device) for number in range(words.tensors)}
    host = HostMemory(device)

    def fresh(state: State) -> State:
        return {number: tensor.to("cpu", copy=True) for number, tensor in state.items()}

    rates = {
        "fresh_gb_per_s": best_rate(state, fresh, lambda away: away, words.repeats),
        "kept_gb_per_s": best_rate(state, host.to_host, host.to_device, words.repeats),
    }
    tell({"bench": "moving", "device": device.type, "mib": words.mib, "tensors": words.tensors, **rates})


if __name__ == "__main__":
    main()
