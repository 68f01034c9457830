"""Seconds of a decode iteration of the native engine as a + b x live requests. Prints one JSON line.

    OMP_NUM_THREADS=1 python -m tests.bench.flash.calibrate [--device cpu]

The model is the random one of tests.bench.generator (Qwen2, 4 layers of 256). `a` and `b` are the least squares line
through the medians of iterations with 1 to 256 live requests; settings.py keeps b / a.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from hpcrl.engines.gen.generation_engine import Request, SamplingParams
from hpcrl.engines.gen.native.engine import NativeEngine
from tests.bench.generator import VOCAB, make_model
from tests.bench.machine import tell

LIVE = (1, 4, 16, 64, 128, 256)
PROMPT, ITERATIONS, BURST = 16, 12, 4


def iteration_s(path: Path, live: int, device: str) -> float:
    """Median seconds of an iteration with `live` requests."""
    engine = NativeEngine(path, max_num_seqs=live, max_length=256, dtype=torch.float32, device=device)
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)
    engine.add([Request(i, rng.integers(0, VOCAB, PROMPT).tolist(), sampling, seed=i) for i in range(live)])
    engine.step(BURST)
    seconds = []
    for _ in range(ITERATIONS):
        start = time.process_time() if device == "cpu" else time.perf_counter()
        engine.step(BURST)
        seconds.append((time.process_time() if device == "cpu" else time.perf_counter()) - start)
    return median(seconds) / BURST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        measured = {live: iteration_s(Path(folder), live, options.device) for live in LIVE}
    b, a = np.polyfit(list(measured), list(measured.values()), 1)
    milliseconds = {live: round(seconds * 1e3, 3) for live, seconds in measured.items()}
    tell({"bench": "flash.calibrate", "device": options.device, "ms": milliseconds, "a_s": a, "b_s": b})


if __name__ == "__main__":
    main()
