"""Bytes that a real FSDP2Engine holds: its tensors, and tensors that autograd saves in a forward pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from hpcrl.checkpoint.writer import SharedFile
from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.models.mtp import ModelMTP
from hpcrl.rollout.batch import Batch
from tests.engines.worlds import Weighted, make_batch, norms_of


def make_engine(folder: Path, dtype: str = "float32", mtp: ModelMTP = "keep", **config: Any) -> FSDP2Engine:
    own = FSDP2Config(**{key: config.pop(key) for key in FSDP2Config.model_fields if key in config})
    settings = TrainerConfig(**{"lr": 1e-3, "logits_chunk_tokens": 16} | config)
    return FSDP2Engine(settings, folder, own=own, dtype=getattr(torch, dtype), total_steps=10, mtp=mtp)


def bytes_of(tensor: Any) -> int:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def held_bytes(folder: Path, dtype: str, **changes: Any) -> dict[str, int]:
    """Part -> bytes of this rank after a step and a snapshot for a checkpoint."""
    trainer = make_engine(folder, dtype, **{"param_dtype": dtype} | changes)
    batch = make_batch([12, 9, 17])
    trainer.train_step(batch, [[0, 1, 2]], Weighted(), norms_of(batch))
    files = trainer.snapshot().values()
    trainer.accumulate(batch, [[0, 1, 2]], Weighted(), norms_of(batch))
    states = trainer.optimizer.state.values()  # type: ignore[union-attr]
    return {
        "weights": sum(map(bytes_of, trainer.shards)),
        "gradients": sum(bytes_of(parameter.grad) for parameter in trainer.shards if parameter.requires_grad),
        "optimizer": sum(bytes_of(value) for state in states for value in state.values()),
        "snapshot": sum(len(file.buffer) for file in files if isinstance(file, SharedFile)),
    }


def saved_bytes(trainer: FSDP2Engine, num_sequences: int, length: int) -> int:
    """Bytes that a forward of equal sequences keeps for its backward, every storage once, parameters not counted.

    With activation checkpointing the layer recomputed in the backward pass is not counted.
    """
    return saved_bytes_of(trainer, make_batch([length] * num_sequences, num_prompt_tokens=1))


def saved_bytes_of(trainer: FSDP2Engine, batch: Batch) -> int:
    """The same of these rows."""
    seen: dict[int, int] = {}
    alive: list[Tensor] = []  # a freed storage's address would be used again

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer._forward(batch, 1.0, False)
    shards = {
        (p.to_local() if hasattr(p, "to_local") else p).untyped_storage().data_ptr() for p in trainer.model.parameters()
    }
    trainer._reshard()
    return sum(size for address, size in seen.items() if address not in shards)


def step_peak(folder: Path, trace: Path, large: bool, num_rows: int, length: int, **config: Any) -> int:
    """Most bytes that this rank's allocator held at once in a train step of two micro-batches beyond what it held
    before. large: like a model too large to stay gathered."""
    if large:
        fsdp2.SMALL_MODEL_BYTES = 0
    return step_peak_of(make_engine(folder, **config), make_batch([length] * 2 * num_rows, num_prompt_tokens=1), trace)


def step_peak_of(trainer: FSDP2Engine, batch: Batch, trace: Path) -> int:
    """The same of these rows, half of them in each micro-batch."""
    num_rows = batch.num_sequences // 2
    plan = [list(range(num_rows)), list(range(num_rows, 2 * num_rows))]
    args = (batch, plan, Weighted(), norms_of(batch))
    trainer.train_step(*args)  # makes the optimizer's state
    return least_peak_bytes(lambda: trainer.train_step(*args), trace / f"trace{dist.get_rank()}.json")


def least_peak_bytes(step: Callable[[], object], file: Path) -> int:
    """peak_bytes() of a step with collectives: gloo's thread may hold a buffer for a moment longer than the step does,
    so this is the least of three."""
    return min(peak_bytes(step, file) for _ in range(3))


def peak_bytes(work: Callable[[], object], file: Path) -> int:
    """Most bytes that the allocator of the CPU held at once during work() beyond what it held before. `file` is
    written on the way."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    profiler.export_chrome_trace(str(file))
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    first = min(events, key=lambda event: float(event["ts"]))["args"]  # the file is not in the order of time
    before = first["Total Allocated"] - first["Bytes"]
    return max(event["args"]["Total Allocated"] for event in events) - before
