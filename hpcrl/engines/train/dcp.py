"""What all engines' checkpoints share: the frame of a tensor in a file of torch.distributed.checkpoint, and the random
state of a rank."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

FACTS = "trainer.json"
ALIGNMENT = 64  # of slices in the file, as torch.save aligns tensors


def random_state() -> dict[str, Any]:
    """Of Python, NumPy and torch on this rank."""
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore it."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def frame(shape: Sequence[int], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """The bytes that torch.save writes before and after such a tensor's data, without their checksum."""
    buffer = io.BytesIO()
    value = torch.empty(shape, dtype=dtype)
    with skip_data():
        torch.save(value, buffer)
    buffer.seek(0)
    with FakeTensorMode():
        start = torch.load(buffer).untyped_storage()._checkpoint_offset
    content = buffer.getbuffer()
    return bytes(content[:start]), bytes(content[start + value.nbytes :])
