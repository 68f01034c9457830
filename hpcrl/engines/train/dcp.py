"""Shared code for all engines' checkpoints: restoring a folder, a tensor's frame in a torch.distributed.checkpoint
file, and a rank's random state."""

from __future__ import annotations

import io
import json
import pickle
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.serialization import skip_data

from hpcrl.engines.train.fail_together import agreed

T = TypeVar("T")

FACTS = "trainer.json"
ALIGNMENT = 64  # alignment of slices in the file, like torch.save's
DAMAGE = (OSError, EOFError, RuntimeError, LookupError, TypeError, json.JSONDecodeError, pickle.UnpicklingError)
"""Errors that readers raise for a file that is missing, truncated or in another format."""


class Base(NamedTuple):
    """The frozen weights to which saved adapters belong."""

    path: str
    fingerprint: str


def shard_name(rank: int) -> str:
    """The name of the file with a rank's tensors."""
    return f"__{rank}_0.distcp"


def facts(optimizer_step: int, base: Base | None = None) -> bytes:
    """The content of the file FACTS."""
    found = {"optimizer_step": optimizer_step, "num_ranks": dist.get_world_size()}
    return json.dumps(found | ({"base": base._asdict()} if base is not None else {})).encode() + b"\n"


def restore(
    folder: Path,
    load_tensors: Callable[[], None],
    base: Base | None = None,
    names: Collection[str] | None = None,
    of_other_engine: bool = False,
    earlier: Callable[[], str] | None = None,
) -> tuple[int, list[str]]:
    """Restore a checkpoint, which any number of ranks has written, with load_tensors(). Returns (optimizer step,
    warnings). `names` has all weights if load_tensors() would not detect that the checkpoint has more. The random state
    `of_other_engine` is not restored. `earlier` computes the base's fingerprint in earlier versions, which the
    checkpoint may have, too. Collective. ValueError on every rank if the folder is not a trainer's
    checkpoint, is damaged, belongs to another model, or has adapters for another base."""
    step, num_ranks, saved = agreed(lambda: readable(folder, lambda: _facts(folder)))
    if saved and base and earlier and saved.fingerprint != base.fingerprint and saved.fingerprint == earlier():
        base = saved
    agreed(lambda: _require_base(folder, saved, base))
    if names is not None:
        agreed(lambda: readable(folder, lambda: _require_weights(folder, names)))
    agreed(lambda: readable(folder, load_tensors))
    if of_other_engine:
        return step, [
            f"checkpoint {folder} was written by another training engine: weights and optimizer are taken over, random "
            "state is not"
        ]
    if num_ranks != dist.get_world_size():
        return step, [
            f"checkpoint {folder} was written by {num_ranks} trainer ranks, now there are {dist.get_world_size()}: "
            "weights and optimizer are resharded, random state is not restored"
        ]
    file = folder / f"random_rank{dist.get_rank()}.pt"
    agreed(lambda: readable(folder, lambda: set_random_state(torch.load(file, weights_only=True))))
    return step, []


def _facts(folder: Path) -> tuple[int, int, Base | None]:
    """(optimizer step, number of ranks, base of adapters)."""
    if not (folder / FACTS).is_file():
        raise ValueError(f"checkpoint {folder}: no {FACTS}; this is not a trainer's checkpoint")
    stored = json.loads((folder / FACTS).read_text())
    base = Base(**stored["base"]) if "base" in stored else None
    return int(stored["optimizer_step"]), int(stored["num_ranks"]), base


def _require_base(folder: Path, saved: Base | None, base: Base | None) -> None:
    if (saved and saved.fingerprint) != (base and base.fingerprint):
        raise ValueError(f"checkpoint {folder} has {_contents(saved)}, and this run trains {_contents(base)}")


def _contents(base: Base | None) -> str:
    if base is None:
        return "whole models (trainer.lora.rank=0)"
    return f"adapters of {base.path} with the weights {base.fingerprint}"


def _require_weights(folder: Path, names: Collection[str]) -> None:
    """ValueError on rank 0 if the checkpoint has additional weights, which load_tensors() would ignore."""
    if dist.get_rank() != 0:
        return
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    require_no_others(folder, (name for name in stored if name.startswith("model.")), names)


def require_no_others(folder: Path, stored: Iterable[str], names: Collection[str]) -> None:
    """ValueError if the checkpoint has weights that the model lacks."""
    if extra := [name for name in stored if name not in names]:
        raise ValueError(
            f"checkpoint {folder} is of another model: it has {len(extra)} tensors that this model lacks, such as "
            f"{min(extra)}"
        )


def readable(folder: Path, read: Callable[[], T]) -> T:
    """Return the result of read(); ValueError in one line if a file of the folder cannot be read."""
    try:
        return read()
    except CheckpointException as error:  # no Exception, and its text is a traceback of each rank
        cause, _ = next(iter(error.failures.values()))
        raise ValueError(f"checkpoint {folder} cannot be read: {_line(cause)}") from error
    except DAMAGE as error:
        raise ValueError(f"checkpoint {folder} cannot be read: {_line(error)}") from error
    except ValueError as error:
        if str(error).startswith(f"checkpoint {folder}"):
            raise
        raise ValueError(f"checkpoint {folder} cannot be read: {' '.join(str(error).split())[:600]}") from error


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def random_state() -> dict[str, Any]:
    """The random state of Python, NumPy and torch on this rank."""
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the random state."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def frame(shape: Sequence[int], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """The bytes that torch.save writes before and after the data of such a tensor, without the data's checksum."""
    buffer = io.BytesIO()
    value = torch.empty(shape, dtype=dtype)
    with skip_data():
        torch.save(value, buffer)
    buffer.seek(0)
    with FakeTensorMode():
        start = torch.load(buffer).untyped_storage()._checkpoint_offset
    content = buffer.getbuffer()
    return bytes(content[:start]), bytes(content[start + value.nbytes :])
