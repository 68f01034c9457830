"""Multi-token prediction layers of a conversion: copied from the model's folder, or left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hpcrl.convert.checkpoints import is_quantised
from hpcrl.convert.dequantize import QuantisedWeights
from hpcrl.convert.sources import TensorSource, TrainerWeights, mtp_in_files
from hpcrl.convert.weight_files import WeightFiles
from hpcrl.models.mtp import MTP, mtp_keys, mtp_names, shared_with_model


class WithMTP:
    """Tensors of a source, without or with tensors of MTP layers from a model folder (TensorSource)."""

    def __init__(
        self,
        source: TensorSource,
        config: Mapping[str, Any],
        folder: TensorSource | WeightFiles | None,
        copies: Mapping[str, str] = MappingProxyType({}),
    ):
        """`folder` has the tensors to add, and may be the source; None leaves them out. `copies` maps further tensors
        to those of the source that they are copies of."""
        self._source, self._folder, self.values = source, folder, source.values
        own = dict.fromkeys(mtp_names(config, source.shapes))
        self.shapes = {name: shape for name, shape in source.shapes.items() if name not in own}
        self.dtypes = {name: source.dtypes[name] for name in self.shapes}
        self.names: frozenset[str] = frozenset()
        if folder is not None:
            shapes, dtypes = _described(folder)
            added = mtp_names(config, shapes)
            self.shapes |= {name: shapes[name] for name in added}
            self.dtypes |= {name: dtypes[name] for name in added}
            self.names = frozenset(added)
        self._copies = copies
        self.shapes |= {name: source.shapes[of] for name, of in copies.items()}
        self.dtypes |= {name: source.dtypes[of] for name, of in copies.items()}

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Rows of an HF tensor."""
        source = self._source if self._folder is None or name not in self.names else self._folder
        return source.read(self._copies.get(name, name), first, last)

    def check_sums(self, report_progress: Callable[[], None]) -> None:
        """See TensorSource."""
        self._source.check_sums(report_progress)

    def close(self) -> None:
        """Close the files."""
        self._source.close()
        if self._folder is not None:
            self._folder.close()


def with_mtp(
    source: TensorSource, config: Mapping[str, Any], model: Path, mtp: MTP, tell: Callable[[str], None]
) -> WithMTP:
    """The source with the MTP layers of the model's folder, in bfloat16 if they are quantised there. `tell` is called
    with a line about layers that are named in config.json, or in the files, and left out."""
    found = WithMTP(source, config, None)
    if mtp == "drop" or source.values:
        return found
    if mtp_names(config, source.shapes):  # quantised weights, or a trained layer
        return WithMTP(source, config, source, _copies(source, config, model))
    why = "has no weights of them"
    if any(model.glob("*.safetensors")):
        try:
            folder = QuantisedWeights(model, config) if is_quantised(model) else WeightFiles(model)
            found = WithMTP(source, config, folder)
        except ValueError as error:
            why = f"cannot be read ({error})"
    if mtp_keys(config) and not found.names:
        tell(f"MTP layers are left out, since {model} {why}; set --model to the folder of the full model to keep them")
    return found


def _copies(source: TensorSource, config: Mapping[str, Any], model: Path) -> dict[str, str]:
    """Tensors of MTP layers in the model's files, and not in the source, that are copies of the source's tensors."""
    if not isinstance(source, TrainerWeights):
        return {}
    shared = {name: shared_with_model(name) for name in mtp_in_files(model, config)}
    found = {name: of for name, of in shared.items() if of and name not in source.shapes}
    return {name: of if of in source.shapes else "model.embed_tokens.weight" for name, of in found.items()}


def _described(
    files: TensorSource | WeightFiles,
) -> tuple[Mapping[str, tuple[int, ...]], Mapping[str, torch.dtype]]:
    if isinstance(files, WeightFiles):
        places = files.tensors
        return {name: p.shape for name, p in places.items()}, {name: p.dtype for name, p in places.items()}
    return files.shapes, files.dtypes
