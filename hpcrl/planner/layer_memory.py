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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from hpcrl.models.families import family_of
from hpcrl.models.from_transformers import decoder_layers, empty_model, quiet
from hpcrl.models.row_modules import row_modules
from hpcrl.models.shape import CannotPlanError, ModelSource

ATTENTION = {True: "hpcrl_measured_gpu", False: "hpcrl_measured_cpu"}
"""Names of attention in transformers' interface, by whether it runs on a GPU."""
SINK_COLUMNS = 8
"""As in engines/blocked_attention.py."""
ROWS = 2
"""Rows of a measured batch: with one, operations return views that are copies with several."""


class Flow(NamedTuple):
    """A moment of a layer's backward pass: bytes of what the layer kept and has not freed, and of gradients of
    activations; and as shares of the layer's parameters, the gradients that are complete, and those that are computed
    and not yet added to sums (None: not known)."""

    num_bytes: int
    complete: float
    adding: float | None


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer for one row.

    Args:
        kept: What autograd keeps.
        own_input: The layer's input, if it is kept.
        computing: The most in the forward pass that keeps this, without the input.
        forward: The most in a forward pass without a backward pass, with the input.
        flows: The moments of the backward pass of which no other exceeds all three numbers, without gradients of
            parameters.
        recomputed: The same if the backward pass recomputes the layer, with the recomputation. It begins when a
            gradient first needs what was not kept, and a tensor that the layer leaves in a mapping of the model, such
            as keys for other layers, keeps all from which it was computed.
        rotations: Other inputs for each token, such as cosines and sines, which no layer before has.
    """

    kept: int
    own_input: int
    computing: int
    forward: int
    flows: tuple[Flow, ...]
    recomputed: tuple[Flow, ...] = ()
    rotations: int = 0


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
    rotations: dict[int, Any] = {}
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [""] * len(layers)
    family = family_of(model.config.get_text_config().model_type)
    for layer, kind in zip(layers, kinds, strict=True):
        for _, module in row_modules(layer.named_modules(), family):
            module.forward = functools.partial(_by_rows, module.forward, length)
        signature = (type(layer), kind, *((name, p.shape) for name, p in layer.named_parameters()))
        layer.forward = functools.partial(_measured, layer.forward, layer, signature, seen, found, rotations)
    try:
        model.set_attn_implementation(attention)
        with quiet(), _any_grouped_products(), _no_search_for_sequences(), torch.device("meta"):
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
    rotations: dict[int, Any],
    *inputs: Any,
    **named: Any,
) -> Any:
    """A layer's forward that is computed and measured once for each kind of layer."""
    import torch
    from torch.utils._pytree import tree_map_only

    inputs, named = tree_map_only(torch.Tensor, lambda each: each.detach(), (inputs, named))
    hidden = inputs[0] if inputs else named.pop("hidden_states")
    shape = hidden.shape
    if signature not in seen:
        with torch.no_grad(), _storages() as alone:
            forward(hidden, *inputs[1:], **named)
        seen[signature] = _trained(forward, layer, hidden, inputs[1:], named, alone.most)
    memory, result = seen[signature]
    before = {*rotations}
    for each in _tensors((inputs[1:], named)):
        is_number = each.is_floating_point() or each.is_complex()
        if is_number and each.ndim > 1 and each.shape[1] == shape[1]:
            rotations[id(each.untyped_storage())] = each  # equal for all rows, if there is one
    new = (each.untyped_storage().nbytes() // each.shape[0] for key, each in rotations.items() if key not in before)
    found.append(replace(memory, rotations=sum(new)))
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

    with torch.enable_grad(), _backward_moments(layer) as storages:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = forward(hidden, *inputs, **named)
        outer = {id(each.untyped_storage()) for each in _tensors((inputs, named))}
        num_bytes = sum(storage.nbytes() for key, storage in kept.items() if key not in outer)
        input_bytes = hidden.untyped_storage().nbytes()
        own_input = input_bytes * (id(hidden.untyped_storage()) in kept)
        kept.clear()
        computing, first = storages.begin(), _tensors(result)[0]
        end = _gradient_of(first)
        result = _like(result)  # the next layer has freed the result
        del first
        end.backward()
        hidden.grad = None
    with torch.enable_grad(), _backward_moments(layer) as again:
        _recompute(forward, hidden, inputs, named, again)
    flows, recomputed = (
        _largest((-(-(most + own_input) // ROWS), *shares) for most, *shares in each.moments())
        for each in (storages, again)
    )
    kept_bytes, own_input, computing, most = (
        -(-each // ROWS) for each in (num_bytes, own_input, computing, alone + input_bytes)
    )
    return LayerMemory(kept_bytes, own_input, computing, most, flows, recomputed), result


def _recompute(
    forward: Callable[..., Any], hidden: Any, inputs: tuple[Any, ...], named: dict[str, Any], storages: Any
) -> None:
    """Both passes with activation checkpointing as engines enable it."""
    from torch.utils.checkpoint import checkpoint

    result = checkpoint(forward, hidden, *inputs, use_reentrant=False, preserve_rng_state=False, **named)
    storages.begin()
    end = _gradient_of(_tensors(result)[0])
    del result
    end.backward()
    hidden.grad = None


@contextlib.contextmanager
def _backward_moments(layer: Any) -> Iterator[Any]:
    """_storages() that are told when gradients of the layer's parameters are complete."""

    def complete(parameter: Any) -> None:
        storages.complete(parameter.grad)
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(complete) for p in layer.parameters() if p.requires_grad]
    with _storages() as storages:
        yield storages
    for hook in hooks:
        hook.remove()


def _largest(moments: Iterable[tuple[int, float, float]]) -> tuple[Flow, ...]:
    found: list[tuple[int, float, float]] = []
    for one in sorted(set(moments), reverse=True):
        if not any(other[1] >= one[1] and other[2] >= one[2] for other in found):
            found.append(one)
    return tuple(Flow(*one) for one in found)


def _gradient_of(result: Any) -> Any:
    """A number whose backward pass makes the result's gradient, which is freed as soon as it is used."""
    import torch

    class End(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            ctx.shape = tensor.shape
            return tensor.new_zeros(())

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.new_empty(ctx.shape)

    return End.apply(result)


def _like(value: Any) -> Any:
    """Other tensors of the same sizes, which no mode counts."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_map_only

    with _disable_current_modes():
        return tree_map_only(torch.Tensor, lambda each: torch.empty_like(each.detach(), device="meta"), value)


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
            self._events: list[tuple[int, int]] = []  # a storage's number, and bytes; 0 if its gradient is complete
            self._gradients: dict[int, int] = {}  # the bytes of parameters' gradients, by their storage's number
            self._first = 0

        def complete(self, gradient: Any) -> None:
            """This gradient of a parameter is complete."""
            storage = gradient.untyped_storage()
            if (number := self._numbers.get(id(storage))) is not None:
                self._gradients[number] = storage.nbytes()
                self._events.append((number, 0))

        def begin(self) -> int:
            """Begin the backward pass; returns the most bytes in the forward pass."""
            self._first = len(self._events)
            return self.most

        @property
        def most(self) -> int:
            """The most bytes at once, without parameters' gradients."""
            return max((num_bytes for num_bytes, *_ in self._states()), default=0)

        def moments(self) -> Iterator[tuple[int, float, float]]:
            """Of each change in the backward pass, the bytes without parameters' gradients, and of these the shares
            that are complete, and that are not."""
            total = max(1, sum(self._gradients.values()))
            for num_bytes, complete, adding in list(self._states())[self._first :]:
                yield num_bytes, complete / total, adding / total

        def _states(self) -> Iterator[tuple[int, int, int]]:
            now = complete = adding = 0
            for number, num_bytes in self._events:
                if number not in self._gradients:
                    now += num_bytes
                elif num_bytes > 0:
                    adding += num_bytes
                elif not num_bytes:
                    complete, adding = complete + self._gradients[number], adding - self._gradients[number]
                yield now, complete, adding

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


@contextlib.contextmanager
def _no_search_for_sequences() -> Iterator[None]:
    """Masks without a search of positions for packed sequences, which would need their values."""
    from transformers import masking_utils

    own, module = masking_utils.find_packed_sequence_indices, cast(Any, masking_utils)
    module.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        module.find_packed_sequence_indices = own


def _by_rows(forward: Callable[..., Any], length: int, *inputs: Any, **named: Any) -> Any:
    """The forward of a module that computes row by row: its tokens are copied from the packed ones and back."""
    import torch
    from torch.utils._pytree import tree_map_only

    def copy(each: Any) -> Any:
        is_of_tokens = each.shape[:2] in ((ROWS, length), (1, length)) and each.is_floating_point()
        return _copied(each) if is_of_tokens else each

    inputs, named = tree_map_only(torch.Tensor, copy, (inputs, named))
    return tree_map_only(torch.Tensor, copy, forward(*inputs, **named))


def _copied(tensor: Any) -> Any:
    """A copy, of which autograd keeps nothing, and whose gradient is a copy, too."""
    import torch

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            return tensor.clone(memory_format=torch.contiguous_format)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.clone(memory_format=torch.contiguous_format)

    return Copy.apply(tensor)


@functools.cache
def _register_attention() -> None:
    import torch
    from transformers import AttentionInterface

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            result = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
            scale = q.new_empty(q.shape[:3], dtype=torch.float32)
            ctx.save_for_backward(q, k, v, result, scale)
            return result

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            q, k, v, *_ = ctx.saved_tensors
            return tuple(torch.empty_like(x) for x in (q, k, v))

    def from_packed(*tensors: Any) -> Iterator[Any]:
        return (_copied(x.transpose(1, 2)).transpose(1, 2) for x in tensors)

    def with_kernel(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, s_aux: Any = None, **_: Any
    ) -> tuple[Any, None]:
        tensors, width = from_packed(query, key, value), value.shape[-1]
        if s_aux is not None:  # another key with the sink's score, in columns of its own
            tensors = (torch.nn.functional.pad(each, (0, SINK_COLUMNS, 1, 0)) for each in tensors)
            return _copied(Kernel.apply(*tensors)[:, 1:, :, :width]), None
        return _copied(Kernel.apply(*tensors)), None

    def on_cpu(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **named: Any) -> tuple[Any, None]:
        if value.shape[-1] == query.shape[-1]:
            return with_kernel(module, query, key, value, attention_mask, **named)
        q, k, v = from_packed(query, key, value)
        gqa = q.shape[1] != k.shape[1]
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return _copied(result.transpose(1, 2)), None

    AttentionInterface.register(ATTENTION[True], with_kernel)
    AttentionInterface.register(ATTENTION[False], on_cpu)
