"""The engine's part of a checkpoint, in FSDP2's format: unsharded tensors under FSDP2's names, each in one rank's file.
It can be read by another number of ranks, another ZeRO stage, and FSDP2 in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from hpcrl.checkpoint.writer import Files
from hpcrl.engines.train.dcp import Base, readable, restore
from hpcrl.engines.train.deepspeed.zero import MOMENTS, set_state, shape_of, state_of
from hpcrl.engines.train.fail_together import agreed
from hpcrl.engines.train.fsdp2.checkpoint import Layout


class ZeroCheckpoints:
    """The weights, moments and step counters of a model, gathered one parameter at a time."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, base: Base | None = None):
        """`base` identifies the frozen weights, if only adapters are saved. Other frozen weights are saved, too."""
        # Tied weights appear once, under their first name.
        self._parameters = {name: p for name, p in model.named_parameters() if base is None or p.requires_grad}
        self._base = base
        self._optimizer = optimizer
        self._layout: Layout | None = None

    def take(self, optimizer_step: int, copy: bool = True) -> Files:
        """This rank's files, which are always copies and valid until the next call. Collective. OSError on every rank
        if any rank lacks memory for the first copy."""
        if self._layout is None:
            self._layout = Layout(copies=True)
            self._layout.lay_out({name: torch.empty(shape) for name, shape in self._mine()})
        for name, parameter in self._parameters.items():
            for key, value in state_of(parameter):
                if (place := self._layout.places.get(_name(name, key))) is not None:
                    place.copy_(value)
            if (place := self._layout.places.get(_name(name, "step"))) is not None:
                place.fill_(optimizer_step)
        return self._layout.files(optimizer_step, base=self._base)

    def load(self, folder: Path) -> tuple[int, list[str]]:
        """Restore a checkpoint; returns (optimizer step, warnings). Each rank reads the tensors that it would write,
        and broadcasts them. Collective. ValueError on every rank if a rank cannot read them, or for another model."""
        names = [_name(name, "") for name in self._parameters]
        step, warned = restore(folder, lambda: self._load_tensors(folder), self._base, names)
        for state in self._optimizer.state.values():
            state["step"].fill_(step)
        return step, warned

    def _load_tensors(self, folder: Path) -> None:
        mine = {name: torch.empty(shape) for name, shape in self._mine()}
        agreed(lambda: readable(folder, lambda: dcp.load(mine, checkpoint_id=folder, no_dist=True)))
        owners = self._owners()
        for name, parameter in self._parameters.items():
            for key in _keys(parameter):
                full = mine.pop(_name(name, key), None)
                values = torch.empty(shape_of(parameter)) if full is None else full
                values = values.to(parameter.device)
                dist.broadcast(values, owners[name])
                set_state(parameter, key, values)

    def _mine(self) -> Iterator[tuple[str, torch.Size]]:
        """Names and shapes of the tensors that this rank writes."""
        owners = self._owners()
        for name, parameter in self._parameters.items():
            if owners[name] == dist.get_rank():
                yield from ((_name(name, key), shape_of(parameter)) for key in _keys(parameter))
                if parameter.requires_grad:
                    yield _name(name, "step"), torch.Size()

    def _owners(self) -> dict[str, int]:
        """Maps each parameter to the rank that writes it: largest first, to the rank with the fewest numbers so far."""
        sizes = {name: shape_of(parameter).numel() for name, parameter in self._parameters.items()}
        written, owners = [0] * dist.get_world_size(), {}
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            owners[name] = written.index(min(written))
            written[owners[name]] += sizes[name]
        return owners


def _keys(parameter: torch.Tensor) -> tuple[str, ...]:
    """The keys of a parameter's tensors, as in state_of()."""
    return ("", *MOMENTS) if parameter.requires_grad else ("",)


def _name(parameter: str, key: str) -> str:
    """FSDP2's name of a weight (key "") or of a tensor of AdamW's state."""
    return f"optimizer.state.{parameter}.{key}" if key else f"model.{parameter}"
