"""Keep weights that a loader of vLLM copies into a parameter directly.

During an update, vLLM's parameters are on the meta device, and their weight loaders keep the weights until a layer has
all of its own. Some models' loaders (GptOssModel) call `parameter.copy_(weight)` instead, which does nothing on the
meta device: the old weights would stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class DirectCopies(TorchFunctionMode):
    """Context in which a copy into one of the model's tensors on the meta device is passed to a weight loader.
    ValueError for a copy into a part of a tensor."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._places = {
            tensor.untyped_storage()._cdata: (module, name)
            for module in model.modules()
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            if tensor.is_meta
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.Tensor.copy_ and args[0].is_meta and not _counting():
            place = self._places.get(args[0].untyped_storage()._cdata)
            if place is not None:
                _load(*place, *args[:2])
                return args[0]
        return func(*args, **(kwargs or {}))


def _counting() -> bool:
    """Whether a weight loader is called, which vLLM then calls again with a tensor that is not on the meta device."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode
    from vllm.model_executor.model_loader.reload.meta import CopyCounter

    return isinstance(_get_current_dispatch_mode(), CopyCounter)


def _load(module: nn.Module, name: str, target: torch.Tensor, weight: torch.Tensor) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    parameter: Any = getattr(module, name)
    if target.shape != parameter.shape:
        raise ValueError(
            f"vLLM's loader copies a weight into a part of {type(module).__name__}.{name}, which is lost in an update"
        )
    parameter.weight_loader = default_weight_loader
    parameter.weight_loader = make_online_process_loader(module, name)
    parameter.weight_loader(parameter, weight)
