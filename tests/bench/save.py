"""How long a save holds training up: against a plain copy of the rank's state in memory, and in a step's time.

    python -m tests.bench.save [--layers N] [--hidden N] [--rounds N]

One rank trains, copies its state plainly into memory that is there, saves, trains while the writer works, and waits for
it, in turns. One JSON line, medians: `prepare_s` to lay the files out, before the first copy; `stall_s` of a save, and
of the first one, which starts the writer; `copy_s`; both in GB/s; `limit_s` = 1.5 copies + 50 ms; `percent_of_step`;
`write_s` until everything is hashed and on the disk; `step_s` of training alone and `step_writing_s` beside the writer.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrl.checkpoint.writer import Writer
from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from tests.bench.machine import tell
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, process_group

LENGTHS = (64,) * 8


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def state_of(engine: FSDP2Engine) -> list[Tensor]:
    """Weights and moments, as they live."""
    assert engine.optimizer is not None
    tensors = [*engine.shards, *(value for state in engine.optimizer.state.values() for value in state.values())]
    return [value.to_local() if isinstance(value, DTensor) else value for value in tensors]


def measure(engine: FSDP2Engine, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of every part, by round; the first round starts the writer, so that it stands apart."""
    batch, writer, buffers = make_batch(LENGTHS), Writer(), list[Tensor]()
    found: dict[str, list[float]] = {name: [] for name in ("step", "copy", "stall", "step_writing", "write")}

    def step() -> None:
        engine.train_step(batch, [list(range(len(LENGTHS)))], Weighted(), norms_of(batch))

    def save(target: Path) -> None:
        writer.start(target, engine.snapshot())

    @torch.no_grad()
    def copy() -> None:
        for buffer, value in zip(buffers, state_of(engine), strict=True):
            buffer.copy_(value)

    found["prepare"] = [seconds(engine.snapshot)]
    step()
    buffers += [value.detach().clone() for value in state_of(engine)]
    try:
        for number in range(rounds + 1):
            target = folder / str(number)
            target.mkdir()
            found["step"].append(seconds(step))
            found["copy"].append(seconds(copy))
            found["stall"].append(seconds(functools.partial(save, target)))
            found["step_writing"].append(seconds(step))
            written = writer.result(wait_s=None)
            assert written is not None
            found["write"].append(written.seconds)
    finally:
        writer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    sizes = {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden, "head_dim": options.hidden // 4}
    with tempfile.TemporaryDirectory() as name, process_group(0, 1, f"{name}/world"):
        model = make_model_folder("qwen2", Path(name) / "model", num_hidden_layers=options.layers, **sizes)
        engine = FSDP2Engine(TrainerConfig(), model, dtype=torch.float32, total_steps=100)
        found = measure(engine, Path(name), options.rounds)
        state_bytes = sum(value.nbytes for value in state_of(engine))
    first, middle = found["stall"][0], {name: median(values[1:] or values) for name, values in found.items()}
    report = {
        "bench": "save",
        "state_mb": round(state_bytes / 1e6, 1),
        **{f"{name}_s": round(value, 4) for name, value in middle.items()},
        "first_stall_s": round(first, 4),
        "limit_s": round(1.5 * middle["copy"] + 0.05, 4),
        "stall_gb_per_s": round(state_bytes / middle["stall"] / 1e9, 2),
        "copy_gb_per_s": round(state_bytes / middle["copy"] / 1e9, 2),
        "stall_over_copy": round(median(s / c for s, c in zip(found["stall"][1:], found["copy"][1:], strict=True)), 2),
        "percent_of_step": round(100 * middle["stall"] / middle["step"], 2),
        "cores": len(os.sched_getaffinity(0)),
    }
    tell(report)


if __name__ == "__main__":
    main()
