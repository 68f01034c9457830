"""Bytes that each layer of a model keeps for its backward pass and holds at once, measured on torch's meta device.

One layer of each kind runs forward and backward at the model's true widths, without memory. Attention stands for a
kernel that keeps queries, keys, values, its result and a scale for each query. CPUs have none for values of another
width than keys (latent attention), where torch's own operations keep the scores. All other operations are
transformers' own, so layers with plain recurrences keep what these keep.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

from hpcrl.models.from_transformers import decoder_layers, empty_model, quiet
from hpcrl.models.shape import CannotPlanError, ModelSource

ATTENTION = {True: "hpcrl_measured_gpu", False: "hpcrl_measured_cpu"}
"""Names of attention in transformers' interface, by whether it runs on a GPU."""
ROWS = 2
"""Rows of a measured batch: with one, operations return views that are copies with several."""


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer for one row, whose input and incoming gradient are counted.

    Args:
        kept: What autograd keeps.
        computing: The most in the forward and backward pass, without gradients of parameters.
        forward: The most in a forward pass without a backward pass.
    """

    kept: int
    computing: int
    forward: int


@functools.lru_cache(maxsize=64)
def measured_layers(source: ModelSource, length: int, dtype: str, gpu: bool = True) -> tuple[LayerMemory, ...]:
    """Of each layer, for one row of this length among several; empty if the model's code does not run on the meta
    device. gpu: whether the layers are computed on one."""
    # Attention with a mask, such as over an indexer's choice of keys, runs as the model's code does without kernels.
    return _measured_with(source, length, dtype, ATTENTION[gpu]) or _measured_with(source, length, dtype, "eager")


def _measured_with(source: ModelSource, length: int, dtype: str, attention: str) -> tuple[LayerMemory, ...]:
    try:
        import torch

        model = empty_model(source, "float32")  # engines convert parameters and not buffers
    except (ImportError, CannotPlanError):
        return ()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    _register_attention()
    _, layers = decoder_layers(model)
    found: list[LayerMemory] = []
    seen: dict[object, tuple[LayerMemory, Any]] = {}
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [""] * len(layers)
    for layer, kind in zip(layers, kinds, strict=True):
        signature = (type(layer), kind, *((name, p.shape) for name, p in layer.named_parameters()))
        layer.forward = functools.partial(_measured, layer.forward, layer, signature, seen, found)
    try:
        model.set_attn_implementation(attention)
        with quiet(), _any_grouped_products(), torch.device("meta"):
            decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
            decoder.eval()(input_ids=torch.zeros(ROWS, length, dtype=torch.int64), use_cache=False)
    except Exception:  # from the model's own code, such as a choice that depends on values
        return ()
    return tuple(found) if len(found) == len(layers) else ()


def _measured(
    forward: Callable[..., Any],
    layer: Any,
    signature: object,
    seen: dict[object, tuple[LayerMemory, Any]],
    found: list[LayerMemory],
    *inputs: Any,
    **named: Any,
) -> Any:
    """A layer's forward that is computed and measured once for each kind of layer."""
    if signature not in seen:
        import torch

        hidden = (inputs[0] if inputs else named.pop("hidden_states")).detach()
        with torch.no_grad(), _storages() as alone:
            forward(hidden, *inputs[1:], **named)
        seen[signature] = _trained(forward, layer, hidden, inputs[1:], named, alone.most)
    memory, result = seen[signature]
    found.append(memory)
    return result


def _trained(
    forward: Callable[..., Any], layer: Any, hidden: Any, inputs: tuple[Any, ...], named: dict[str, Any], alone: int
) -> tuple[LayerMemory, Any]:
    import torch

    hidden.requires_grad_()
    own = {id(parameter.untyped_storage()) for parameter in layer.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if id(storage) not in own:
            kept[id(storage)] = storage
        return tensor

    def forget(parameter: Any) -> None:
        storages.leave_out(parameter.grad)
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(forget) for p in layer.parameters() if p.requires_grad]
    with torch.enable_grad(), _storages() as storages:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = forward(hidden, *inputs, **named)
        outer = {id(each.untyped_storage()) for each in _tensors((inputs, named))}
        num_bytes = sum(storage.nbytes() for key, storage in kept.items() if key not in outer)
        saves_input = id(hidden.untyped_storage()) in kept
        kept.clear()
        first = _tensors(result)[0]
        # The result stands for its gradient, which has the same size: the next layer has freed the result.
        torch.autograd.backward(first, torch.empty_like(first))
    for hook in hooks:
        hook.remove()
    input_bytes = hidden.untyped_storage().nbytes()
    detached = tuple(each.detach() for each in result) if isinstance(result, tuple) else result.detach()
    of_rows = (num_bytes, storages.most + input_bytes * saves_input, alone + input_bytes)
    return LayerMemory(*(-(-each // ROWS) for each in of_rows)), detached


def _tensors(value: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storages() -> Any:
    """A context that records the bytes of all storages made in it, and when they are freed."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Storages(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self._numbers: dict[int, int] = {}  # of the living storages, by their id
            self._events: list[tuple[int, int]] = []  # a storage's number, and bytes
            self._left_out: set[int] = set()

        def leave_out(self, tensor: Any) -> None:
            """Do not count this tensor's storage."""
            self._left_out.add(self._numbers.get(id(tensor.untyped_storage()), -1))

        @property
        def most(self) -> int:
            """The most bytes at once."""
            counted = (num_bytes for number, num_bytes in self._events if number not in self._left_out)
            return max(accumulate(counted), default=0)

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = {id(each.untyped_storage()) for each in _tensors((args, kwargs or {}))}
            result = operation(*args, **(kwargs or {}))
            for each in _tensors(result):
                storage = each.untyped_storage()
                if id(storage) not in self._numbers and id(storage) not in before and each.device.type == "meta":
                    self._numbers[id(storage)] = number = len(self._events)
                    self._events.append((number, storage.nbytes()))
                    weakref.finalize(storage, self._freed, id(storage), number, storage.nbytes())
            return result

        def _freed(self, key: int, number: int, num_bytes: int) -> None:
            self._numbers.pop(key, None)
            self._events.append((number, -num_bytes))

    return Storages()


@contextlib.contextmanager
def _any_grouped_products() -> Iterator[None]:
    """Products of experts in float32 too: torch's own have no shapes on the meta device for it."""
    import torch
    from transformers.integrations import moe

    class Grouped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Any, weight: Any) -> Any:
            ctx.save_for_backward(rows, weight)
            return rows.new_empty(len(rows), weight.shape[-1])

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            rows, weight = ctx.saved_tensors
            return torch.empty_like(rows), torch.empty_like(weight)

    def product(input: Any, weight: Any, offs: Any) -> Any:
        return Grouped.apply(input.to(weight.dtype), weight)

    own, module = moe._grouped_mm, cast(Any, moe)
    module._grouped_mm = product
    try:
        yield
    finally:
        module._grouped_mm = own


@functools.cache
def _register_attention() -> None:
    import torch
    from transformers import AttentionInterface

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x.transpose(1, 2).clone().transpose(1, 2) for x in (q, k, v))
            result = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
            scale = q.new_empty(q.shape[:3], dtype=torch.float32)
            ctx.save_for_backward(q, k, v, result, scale)
            return result.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            q, k, v, *_ = ctx.saved_tensors
            grads = [torch.empty_like(x) for x in (q, k, v)]
            return tuple(x.clone() for x in grads)

    def with_kernel(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> tuple[Any, None]:
        return Attention.apply(query, key, value), None

    def on_cpu(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> tuple[Any, None]:
        if value.shape[-1] == query.shape[-1]:
            return with_kernel(module, query, key, value, attention_mask)
        q, k, v = (x.transpose(1, 2).clone().transpose(1, 2) for x in (query, key, value))
        gqa = q.shape[1] != k.shape[1]
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return result.transpose(1, 2).clone(), None

    AttentionInterface.register(ATTENTION[True], with_kernel)
    AttentionInterface.register(ATTENTION[False], on_cpu)
