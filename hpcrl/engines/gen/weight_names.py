"""Check the names and shapes of new weights, for engines that silently keep a parameter if no new weight arrives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from hpcrl.config import LoRAConfig
from hpcrl.models.families import known_shape
from hpcrl.planner.adapters import adapters


class WeightNames:
    """The names and shapes of a model's weights; empty if they are not known, and then nothing is checked."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self._shapes = shapes

    def __bool__(self) -> bool:
        """Whether the names are known."""
        return bool(self._shapes)

    @classmethod
    def of(cls, folder: Path, lora: LoRAConfig | None = None) -> WeightNames:
        """The names for a folder in HF layout, or for its adapters; unknown for a family whose parameters are not
        known."""
        if (shape := known_shape(folder)) is None:
            return cls({})
        parameters = adapters(lora, shape) if lora is not None else shape.parameters
        return cls({parameter.name: parameter.shape for parameter in parameters})

    def check(self, named: Iterable[tuple[str, torch.Tensor]], kept: Collection[str] = ()) -> None:
        """ValueError on an unknown name, on a missing name that is not in `kept`, or on a wrong shape."""
        for _ in self.checked(named, kept):
            pass

    def checked(
        self, named: Iterable[tuple[str, torch.Tensor]], kept: Collection[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights. ValueError as soon as one is wrong, or at the end if some are missing that are not in
        `kept`."""
        missing = {name: shape for name, shape in self._shapes.items() if name not in kept}
        for name, tensor in named:
            if self._shapes:
                wanted = missing.pop(name, None)
                if wanted is None:
                    raise ValueError(f"weight {name} is not in the model, or came twice")
                if tuple(tensor.shape) != wanted:
                    raise ValueError(f"weight {name} has the shape {tuple(tensor.shape)}, the model has {wanted}")
            yield name, tensor
        if missing:
            raise ValueError(f"{len(missing)} weights are missing: {', '.join(list(missing)[:3])} ...")
