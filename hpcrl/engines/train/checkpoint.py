"""A trainer's part of a checkpoint: sharded tensors by torch.distributed.checkpoint, random state by rank."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

FACTS = "trainer.json"


def _random_state() -> dict[str, Any]:
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer if optimizer is not None else ())
    return {"model": weights, "optimizer": moments}


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, optimizer_step: int) -> list[str]:
    """Write the sharded model and optimizer, each rank's random state, and trainer.json. Collective.

    Returns the names of the files that this rank wrote. The caller makes the folder durable: it flushes and commits
    all files of a checkpoint together. OSError names the trainer rank that could not write.
    """
    try:
        dcp.save(_tensors(model, optimizer), checkpoint_id=folder)
    except CheckpointException as error:  # the same on every rank; no Exception, and its text is several tracebacks
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"trainer rank {rank} could not write: {type(cause).__name__}: {cause}") from error
    torch.save(_random_state(), folder / f"random_rank{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        facts = {"optimizer_step": optimizer_step, "num_ranks": dist.get_world_size()}
        (folder / FACTS).write_text(json.dumps(facts) + "\n")
    dist.barrier()
    own = [path.name for path in folder.glob(f"__{dist.get_rank()}_*.distcp")]
    own.append(f"random_rank{dist.get_rank()}.pt")
    return own + ([".metadata", FACTS] if dist.get_rank() == 0 else [])


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[int, list[str]]:
    """(optimizer step, warnings) after restoring what save() wrote, on any number of ranks. Collective.

    ValueError if the folder holds no trainer checkpoint.
    """
    if not (folder / FACTS).is_file():
        raise ValueError(f"checkpoint {folder}: no {FACTS}; this is not a trainer's checkpoint")
    facts = json.loads((folder / FACTS).read_text())
    tensors = _tensors(model, optimizer)
    dcp.load(tensors, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer if optimizer is not None else (),
        model_state_dict=tensors["model"],
        optim_state_dict=tensors["optimizer"],
    )
    if facts["num_ranks"] != dist.get_world_size():
        return facts["optimizer_step"], [
            f"checkpoint {folder} was written by {facts['num_ranks']} trainer ranks, now there are "
            f"{dist.get_world_size()}: weights and optimizer are resharded, random state is not restored"
        ]
    _set_random_state(torch.load(folder / f"random_rank{dist.get_rank()}.pt", weights_only=True))
    return facts["optimizer_step"], []
