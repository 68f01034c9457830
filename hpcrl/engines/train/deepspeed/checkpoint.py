"""The engine's part of a checkpoint, in FSDP2's format: unsharded tensors under FSDP2's names, each in one rank's file.
It can be read by another number of ranks, another ZeRO stage, and other engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hpcrl.checkpoint.writer import Files
from hpcrl.engines.train.dcp import Base, readable, restore
from hpcrl.engines.train.deepspeed.zero import MOMENTS, set_state, shape_of, state_of
from hpcrl.engines.train.fail_together import agreed
from hpcrl.engines.train.fsdp2.checkpoint import Layout
from hpcrl.engines.train.stored_state import StoredState, is_megatron, opened, require_tensors
from hpcrl.spec.weight_layout import full_slice


class ZeroCheckpoints:
    """The weights, moments and step counters of a model, gathered one parameter at a time."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        model_path: Path,
        base: Base | None = None,
        earlier: Callable[[], str] | None = None,
    ):
        """`model_path` is the folder of the initial model. `base` identifies the frozen weights, if only adapters are
        saved, and `earlier` computes their fingerprint in earlier versions. Other frozen weights and buffers are
        saved, too."""
        self._model, self._model_path, self._base, self._earlier = model, model_path, base, earlier
        self._optimizer = optimizer
        self._layout: Layout | None = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers to save. Tied weights appear once, under their first name."""
        if self._base is not None:
            return {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        values = self._model.state_dict(keep_vars=True).items()
        buffers = {name: value for name, value in values if not isinstance(value, nn.Parameter)}
        return dict(self._model.named_parameters()) | buffers

    def take(self, optimizer_step: int, copy: bool = True) -> Files:
        """This rank's files, which are always copies and valid until the next call. Collective. OSError on every rank
        if any rank lacks memory for the first copy."""
        if self._layout is None:
            self._layout = Layout(copies=True)
            self._layout.lay_out({name: torch.empty(shape) for name, shape in self._mine()})
        for name, tensor in self._tensors().items():
            for key, value in state_of(tensor):
                if (place := self._layout.places.get(_name(name, key))) is not None:
                    place.copy_(value)
            if (place := self._layout.places.get(_name(name, "step"))) is not None:
                place.fill_(optimizer_step)
        return self._layout.files(optimizer_step, base=self._base)

    def load(self, folder: Path) -> tuple[int, list[str]]:
        """Restore a checkpoint; returns (optimizer step, warnings). One rank reads a tensor, and broadcasts it.
        Collective. ValueError on every rank if a rank cannot read them, or for another model."""
        others = is_megatron(folder)
        step, warned = restore(
            folder,
            lambda: self._load_tensors(folder),
            self._base,
            of_other_engine=others,
            earlier=self._earlier,
        )
        for state in self._optimizer.state.values():
            state["step"].fill_(step)
        return step, warned

    def _load_tensors(self, folder: Path) -> None:
        tensors = self._tensors()
        state, owners = agreed(lambda: readable(folder, lambda: self._opened(folder, tensors))), self._owners()
        for name, tensor in tensors.items():
            for key in _keys(tensor):
                if state.has(_in_file(name), key):
                    values = self._read(state, folder, (name, key), shape_of(tensor), owners[name])
                    set_state(tensor, key, values.to(tensor.device))
        state.close()

    def _opened(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> StoredState:
        """The checkpoint, in which buffers may be missing, since earlier versions saved none."""
        state = opened(folder, self._model_path)
        wanted: dict[tuple[str, str], tuple[int, ...]] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter) or state.has(_in_file(name), ""):
                wanted |= {(_in_file(name), key): shape_of(tensor) for key in _keys(tensor)}
        require_tensors(folder, state, wanted)
        return state

    @staticmethod
    def _read(state: StoredState, folder: Path, place: tuple[str, str], shape: torch.Size, owner: int) -> torch.Tensor:
        """A full tensor, float32, which its owner reads. Collective."""
        name, key = place

        def read() -> torch.Tensor:
            if owner != dist.get_rank():
                return torch.empty(shape)
            return state.read(_in_file(name), key, full_slice(shape)).float()

        values = agreed(lambda: readable(folder, read)).to("cuda" if torch.cuda.is_available() else "cpu")
        dist.broadcast(values, owner)
        return values

    def _mine(self) -> Iterator[tuple[str, torch.Size]]:
        """Names and shapes of the tensors that this rank writes."""
        owners = self._owners()
        for name, parameter in self._tensors().items():
            if owners[name] == dist.get_rank():
                yield from ((_name(name, key), shape_of(parameter)) for key in _keys(parameter))
                if parameter.requires_grad:
                    yield _name(name, "step"), torch.Size()

    def _owners(self) -> dict[str, int]:
        """Maps each parameter to the rank that writes it: largest first, to the rank with the fewest numbers so far."""
        sizes = {name: shape_of(tensor).numel() for name, tensor in self._tensors().items()}
        written, owners = [0] * dist.get_world_size(), {}
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            owners[name] = written.index(min(written))
            written[owners[name]] += sizes[name]
        return owners


def _keys(parameter: torch.Tensor) -> tuple[str, ...]:
    """The keys of a parameter's tensors, as in state_of()."""
    return ("", *MOMENTS) if parameter.requires_grad else ("",)


def _in_file(name: str) -> str:
    """A tensor's name in StoredState."""
    return name.removeprefix("hf.")


def _name(parameter: str, key: str) -> str:
    """FSDP2's name of a weight (key "") or of a tensor of AdamW's state."""
    return f"optimizer.state.{parameter}.{key}" if key else f"model.{parameter}"
