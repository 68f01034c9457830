"""A trainer's state in a checkpoint under transformers' names, whichever engine has written it: weights, and AdamW's
moments; of a run with adapters, only theirs.

fsdp2 and deepspeed write these names; Megatron's tensors are read through its table of names. So an engine resumes from
another engine's checkpoint directly, and each rank reads slices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hpcrl.checkpoint.shards import ShardedCheckpoint
from hpcrl.engines.train.dcp import require_no_others
from hpcrl.spec.table import load
from hpcrl.spec.weight_layout import TensorSlice

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS, STATE = "model.hf.", "optimizer.state.hf."
MEGATRON = "hpcrl.engines.train.megatron.stored:stored_state"
TORCH_DIST = "metadata.json"
"""The file that only Megatron's format has."""


class StoredState(Protocol):
    """Tensors of a checkpoint. A tensor's key is "" for the weight, exp_avg or exp_avg_sq for its moments, which frozen
    weights and buffers do not have."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of all weights and buffers, each tied weight once."""

    def has(self, name: str, key: str) -> bool:
        """Whether the checkpoint has this tensor."""

    def read(self, name: str, key: str, tensor_slice: TensorSlice) -> Tensor:
        """A slice of a tensor, in the stored dtype. ValueError if a file is damaged."""

    def close(self) -> None:
        """Close the files."""


class NamedState:
    """The state that fsdp2 or deepspeed has written. ValueError if it is not AdamW's."""

    def __init__(self, folder: Path):
        self._checkpoint = ShardedCheckpoint(folder)
        tensors = self._checkpoint.tensors
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name.removeprefix(WEIGHTS): stored.shape for name, stored in tensors.items() if name.startswith(WEIGHTS)
        }
        keys = {name.rpartition(".")[2] for name in tensors if name.startswith(STATE)}
        if others := sorted(keys - {*MOMENTS, "step"}):
            raise ValueError(
                f"checkpoint {folder}: its optimizer has {', '.join(others)}, which AdamW has not; resume it with the "
                "trainer.optimizer and trainer.engine of the run"
            )

    def has(self, name: str, key: str) -> bool:
        """See StoredState."""
        return _place(name, key) in self._checkpoint.tensors

    def read(self, name: str, key: str, tensor_slice: TensorSlice) -> Tensor:
        """See StoredState."""
        return self._checkpoint.read(_place(name, key), tensor_slice)

    def close(self) -> None:
        """See StoredState."""
        self._checkpoint.close()


def _place(name: str, key: str) -> str:
    return f"{STATE}{name}.{key}" if key else f"{WEIGHTS}{name}"


def is_megatron(folder: Path) -> bool:
    """Whether a Megatron trainer has written the checkpoint."""
    return (folder / TORCH_DIST).is_file()


def opened(folder: Path, model_path: Path) -> StoredState:
    """The state in a checkpoint folder of a run that began with the model in `model_path`. ValueError if it is damaged,
    of another model, or not AdamW's."""
    if not is_megatron(folder):
        return NamedState(folder)
    config: dict[str, Any] = json.loads((model_path / "config.json").read_text())
    state: StoredState = load(MEGATRON, "checkpoints of trainer.engine=megatron")(folder, config)
    return state


def require_tensors(folder: Path, state: StoredState, wanted: Mapping[tuple[str, str], tuple[int, ...]]) -> None:
    """ValueError if a tensor, by name and key, is missing in the checkpoint or has another shape, or if the checkpoint
    has other weights."""
    require_no_others(folder, state.shapes, {name for name, _ in wanted})
    for (name, key), shape in wanted.items():
        if not state.has(name, key):
            text = f"{key} of {name}" if key else name
            raise ValueError(f"checkpoint {folder}: it lacks {text}; it is of another model")
        if (found := state.shapes[name]) != tuple(shape):
            raise ValueError(f"checkpoint {folder}: {name} has shape {list(found)}, this model needs {list(shape)}")
