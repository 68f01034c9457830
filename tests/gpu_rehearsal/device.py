"""A CUDA device that is not there: tensors that say they are on it, and compute on the CPU.

Their numbers are real. What would stop on a GPU stops here: tensors of two devices in one operation, and numbers of the
device asked for as if they were on the host. What makes the host wait is noted in a ledger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu_rehearsal.ledger import Ledger, whose
from tests.gpu_rehearsal.streams import Stream

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten

TO_HOST, TO_DEVICE, FROM_PAGES = "to host", "to device", "to device from pageable memory"
SYNCHRONIZE = "synchronize"
MIXING = {aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
MIXING |= {aten._index_put_impl_.default, aten.is_set_to.default}
"""Operations that take tensors of both devices."""
WAITING = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.bincount.default: "bincount",
    aten._unique2.default: "unique",
    aten.unique_consecutive.default: "unique_consecutive",
    aten.equal.default: "equal",
    aten.allclose.default: "allclose",
}
"""Operations whose kernels wait for the device: the host needs a number, or the size of the result."""


class _State:
    """Of the rehearsal that is on."""

    ledger = Ledger()
    stream = Stream()
    pinned: dict[int, torch.UntypedStorage | None]  # by address; kept, so that no other memory has it
    on_device = False
    """In a function with tensors on the device: what C++ makes for it is there."""


STATE = _State()


def waits(what: str, until: int | None = None) -> None:
    """The host waits here for what it has asked for."""
    STATE.ledger.note(what)
    STATE.stream.end(until)


class OnDevice(Tensor):
    """elem: its numbers."""

    @staticmethod
    def __new__(cls, elem: Tensor) -> OnDevice:
        return Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=elem.device,
            requires_grad=False,
        )

    def __init__(self, elem: Tensor):
        assert not isinstance(elem, OnDevice)
        self.elem = elem

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elem.untyped_storage()

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    __array__ = numpy

    def tolist(self) -> Any:
        waits("tolist")
        return self.elem.tolist()

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    def record_stream(self, stream: Any) -> None:
        """There is one stream."""

    def pin_memory(self, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"OnDevice({self.elem!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> OnDevice:
        return OnDevice(inner["elem"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def is_pinned(tensor: Tensor) -> bool:
    return not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in STATE.pinned


def pinned(tensor: Tensor) -> Tensor:
    """Note that its memory is pinned."""
    storage = tensor.untyped_storage()
    STATE.pinned[storage.data_ptr()] = storage
    return tensor


def tensors_in(*values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def numbers(x: Any) -> Any:
    return x.elem if isinstance(x, OnDevice) else x


def on_device(x: Any) -> Any:
    return OnDevice(x) if isinstance(x, Tensor) and not isinstance(x, OnDevice) and x.device.type == "cpu" else x


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation with tensors on the device, or whose result is there."""
    leaves = tensors_in(args, kwargs)
    mine = [x for x in leaves if isinstance(x, OnDevice)]
    host = [x for x in leaves if not isinstance(x, OnDevice)]
    collective = func.namespace in ("c10d", "_c10d_functional")
    if mine and not collective and func not in MIXING and any(x.dim() and x.device.type != "meta" for x in host):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({func}, at {whose()})"
        )
    to_device, device = is_cuda(kwargs.get("device")), kwargs.get("device")
    given = device is not None and not (STATE.on_device and mine and torch.device(device).type == "cpu")
    if mine:
        _note(func, args, kwargs)
    if func is aten.copy_.default and len(mine) == 1 and len(host) == 1:
        return _copy(*args[:2], non_blocking=bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))
    if func is aten._to_copy.default and given and bool(mine) != to_device:
        waits(TO_HOST if mine else TO_DEVICE)
    if to_device:
        kwargs = kwargs | {"device": CPU}
    out = SUBSTITUTES.get(func, func)(*tree_map(numbers, args), **tree_map(numbers, kwargs))
    if collective:
        back = {id(x.elem): x for x in mine}
        return tree_map(lambda x: back[id(x)] if id(x) in back else on_device(x) if mine else x, out)
    if func is aten._to_copy.default and to_device == (not mine):
        shared = {numbers(x).data_ptr() for x in leaves}
        out = out.clone() if out.numel() and out.data_ptr() in shared else out
    if not (to_device or (mine and not (given and not to_device))):
        return out
    schema = func._schema
    if schema.is_mutable or any(argument.alias_info for argument in schema.arguments):
        same = {id(x.elem): x for x in mine}  # in place: the same object
        return tree_map(lambda x: same[id(x)] if id(x) in same else on_device(x), out)
    return tree_map(on_device, out)


def _note(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """What makes the host wait in an operation with a tensor on the device."""
    if func in WAITING:
        waits(WAITING[func])
    elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        waits("repeat_interleave")
    elif func in MIXING and func.__name__.startswith(("index", "_index")):
        indices = [x for x in args[1] if x is not None]
        one_number = func is not aten.index.Tensor and args[2].numel() == 1  # becomes masked_fill
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            if not one_number:
                waits("index by a mask")
        elif isinstance(args[0], OnDevice):
            for _ in (x for x in indices if not isinstance(x, OnDevice)):
                waits(TO_DEVICE)


def _copy(place: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """ProcessInfo.copy_(source) between the devices."""
    if isinstance(place, OnDevice):
        _upload(source, non_blocking)
        place.elem.copy_(source)
    elif non_blocking and is_pinned(place):
        STATE.stream.to_host(place, source.elem.to(place.dtype).expand(place.shape))  # type: ignore[attr-defined]
    else:
        waits(TO_HOST)
        place.copy_(source.elem)  # type: ignore[attr-defined]
    return place


def _upload(source: Tensor, non_blocking: bool) -> None:
    if not non_blocking:
        waits(TO_DEVICE)
    elif is_pinned(source):
        STATE.stream.from_host(source)
    else:
        waits(FROM_PAGES)


class Dispatch(TorchDispatchMode):
    """Operations that name the device, and those of DTensors' parts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tensors_in(args, kwargs)
        if any(type(x).__name__ in ("DTensor", "AsyncCollectiveTensor") for x in leaves):
            return NotImplemented  # their parts come here
        if is_cuda(kwargs.get("device")) or any(isinstance(x, OnDevice) for x in leaves):
            return compute(func, args, kwargs)
        pin = kwargs.pop("pin_memory", False) if not leaves else False
        out = func(*args, **kwargs)
        if pin:
            return pinned(out)
        return tree_map(on_device, out) if STATE.on_device and not leaves else out


def _mm_with_dtype(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (a.float() @ b.float()).to(out_dtype)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("_histc_cuda does not have a deterministic implementation")
    return aten.histc.default(x.float(), bins, min, max).to(x.dtype)


SUBSTITUTES: dict[Any, Callable[..., Any]] = {aten.mm.dtype: _mm_with_dtype, aten.histc.default: _histc}
"""Kernels that only CUDA has."""


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, non_blocking: bool) -> Tensor:
        ctx.dtype = x.dtype
        _upload(x, non_blocking)
        return OnDevice(x.detach().to(dtype, copy=True))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        waits(TO_HOST)
        return grad.elem.to(ctx.dtype), None, None


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, dtype: torch.dtype, non_blocking: bool) -> Tensor:
        ctx.dtype = x.dtype
        out = x.elem.detach().to(dtype, copy=True)
        if non_blocking:
            STATE.stream.to_host(pinned(out), out)
        else:
            waits(TO_HOST)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        waits(TO_DEVICE)
        return OnDevice(grad.to(ctx.dtype)), None, None


def moved(x: Tensor, device: torch.device, dtype: torch.dtype, non_blocking: bool = False) -> Tensor | None:
    """A copy on the other device; None if the tensor is on this one."""
    if isinstance(x, DTensor):
        part = moved(x.to(dtype)._local_tensor, device, dtype, non_blocking)
        return None if part is None else DTensor(part, x._spec, requires_grad=False)
    if device.type == "meta":
        return torch.empty_like(numbers(x), device="meta", dtype=dtype)
    if (device.type == "cuda") == isinstance(x, OnDevice):
        return None
    return (_Down if isinstance(x, OnDevice) else _Up).apply(x, dtype, non_blocking)


def _wanted(args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, bool, bool]:
    """(device, dtype, non_blocking, copy) of Tensor.to's arguments."""
    device = dtype = None
    flags = []
    for a in args:
        if isinstance(a, torch.dtype):
            dtype = a
        elif isinstance(a, Tensor):
            device, dtype = a.device, a.dtype
        elif isinstance(a, bool) or (device is not None and isinstance(a, int)):
            flags.append(bool(a))
        elif a is not None:
            device = torch.device("cuda", a) if isinstance(a, int) else torch.device(a)
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
    dtype = kwargs.get("dtype") or dtype
    non_blocking, copy = (*flags, *(False, False)[len(flags) :])[:2]
    return device, dtype, kwargs.get("non_blocking", non_blocking), kwargs.get("copy", copy)


FACTORIES = {
    torch.zeros,
    torch.ones,
    torch.empty,
    torch.full,
    torch.arange,
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.eye,
    torch.linspace,
    torch.tensor,
    torch.as_tensor,
    torch.empty_strided,
    torch.scalar_tensor,
    torch.from_numpy,
    torch.frombuffer,
    torch.tril_indices,
    torch.triu_indices,
}
"""What makes a tensor on the host unless told otherwise."""


SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class Functions(TorchFunctionMode):
    """What is decided above the dispatcher: moves, pinned memory, and what Python asks of a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, before = dict(kwargs or {}), STATE.on_device
        if type(kwargs.get("device")) is int:
            kwargs["device"] = CUDA
        is_operation = isinstance(func, torch._ops.OpOverload)
        if func in FACTORIES or (kwargs.get("device") is not None and not is_operation):
            STATE.on_device = False
        elif is_operation:
            return func(*args, **kwargs)
        elif func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad) or any(
            isinstance(getattr(x, "_local_tensor", x), OnDevice) for x in tensors_in(args, kwargs)
        ):
            STATE.on_device = True
        try:
            return self._call(func, args, kwargs)
        finally:
            STATE.on_device = before

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else None
        if func is Tensor.to and isinstance(x, Tensor):
            return self._to(func, x, *_wanted(args[1:], kwargs))
        if func in (Tensor.cpu, Tensor.cuda):
            out = moved(x, CPU if func is Tensor.cpu else CUDA, x.dtype)
            return x if out is None else out
        if func is Tensor.type and len(args) == 1 and isinstance(x, OnDevice):
            return x.elem.type().replace("torch.", "torch.cuda.")
        if func is Tensor.backward:
            given = kwargs.get("gradient", args[1] if len(args) > 1 else None)
            with Functions():
                ones = torch.ones_like(x) if given is None else given
                return _engine_run_backward(
                    (x,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        if func is torch.autograd.grad:
            return self._grad(args, kwargs)
        if func is Tensor.is_pinned:
            return is_pinned(x)
        if func is Tensor.pin_memory and not isinstance(x, OnDevice):
            return x if is_pinned(x) else pinned(x.clone())
        if isinstance(x, OnDevice) and func in (Tensor.numpy, Tensor.tolist, Tensor.untyped_storage):
            return getattr(OnDevice, func.__name__)(x)
        if func is torch.tensor and isinstance(x, list | tuple):
            args = (tree_map(lambda each: each.item() if isinstance(each, OnDevice) else each, x), *args[1:])
        if func in (torch.tensor, torch.as_tensor) and is_cuda(kwargs.get("device")):
            made = func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
            return made if isinstance(made, OnDevice) else moved(made, CUDA, made.dtype)
        if getattr(func, "__name__", "") == "__get__" and isinstance(getattr(x, "_local_tensor", x), OnDevice):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name in ("device", "is_cuda", "is_cpu"):
                return {"device": CUDA, "is_cuda": True, "is_cpu": False}[name]
        if func == SET_DATA and isinstance(x, OnDevice):
            func(x, on_device(args[1]))
            x.elem = numbers(args[1])
            return None
        return func(*args, **kwargs)

    @staticmethod
    def _to(func: Any, x: Tensor, device: Any, dtype: Any, non_blocking: bool, copy: bool) -> Tensor:
        dtype = dtype or x.dtype
        out = moved(x, device, dtype, non_blocking) if device is not None else None
        if out is not None:
            return out
        if dtype == x.dtype:
            return x.clone() if copy else x
        return func(x, dtype, copy=copy)

    @staticmethod
    def _grad(args: Any, kwargs: dict[str, Any]) -> Any:
        def several(value: Any) -> tuple[Any, ...]:
            return (value,) if isinstance(value, Tensor) or value is None else tuple(value)

        outs, ins = several(args[0]), several(args[1])
        given = several(args[2] if len(args) > 2 else kwargs.get("grad_outputs"))
        with Functions():
            ones = tuple(torch.ones_like(o) if g is None else g for o, g in zip(outs, given, strict=True))
            allow = kwargs.get("allow_unused", False)
            return _engine_run_backward(outs, ones, False, False, ins, allow, accumulate_grad=False)


class CudaStream:
    """torch.cuda.Stream, and Event: what was started before its record()."""

    cuda_stream = stream_id = device_index = 0
    device, device_type = CUDA, 1

    def __init__(self, *args: Any, **kwargs: Any):
        self._until: int | None = None

    def __enter__(self) -> CudaStream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream)

    def __hash__(self) -> int:
        return 0

    def _in_order(self, *args: Any) -> None:
        """The device waits, not the host."""

    wait_stream = wait_event = wait = _in_order

    def record(self, *args: Any) -> None:
        self._until = STATE.stream.now

    def record_event(self, *args: Any) -> CudaStream:
        event = CudaStream()
        event.record()
        return event

    def synchronize(self) -> None:
        waits(SYNCHRONIZE, self._until)

    def query(self) -> bool:
        """Asked again and again, it is true at last."""
        STATE.stream.end(self._until)
        return True


class _NoGradInstead:
    """torch._C._InferenceMode, in which no wrapper can be made."""

    def __init__(self, mode: bool = True):
        self._context: Any = torch.no_grad() if mode else contextlib.nullcontext()

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *args: Any) -> None:
        self._context.__exit__(*args)


class _OfTheCpu:
    """torch.Generator, also for the device."""

    own = torch.Generator

    def __new__(cls, device: Any = "cpu") -> Any:
        return cls.own("cpu")


def _register(address: int, num_bytes: int, flags: int) -> int:
    """cudaHostRegister, of memory that stays."""
    STATE.pinned[address] = None
    return 0


_swap_tensors = torch.utils.swap_tensors


def _swapped(parameter: Tensor, other: Tensor) -> None:
    """torch.utils.swap_tensors, where a class changes; it refuses what others refer to."""
    if type(parameter) is type(other) and isinstance(parameter, OnDevice):
        parameter.data = other
    else:
        _swap_tensors(parameter, other)


@contextlib.contextmanager
def gpu(ledger: Ledger | None = None) -> Iterator[Ledger]:
    """A GPU is there; what waits for it is noted in the ledger."""
    STATE.ledger, STATE.stream, STATE.pinned = ledger or Ledger(), Stream(), {}
    STATE.on_device = False
    about = SimpleNamespace(uuid="gpu-0", total_memory=80 << 30, name="H100", major=9, minor=0)
    cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=0: about,
        "get_device_capability": lambda device=None: (9, 0),
        "default_generators": (torch.default_generator,),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "synchronize": lambda device=None: waits(SYNCHRONIZE),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=_register),
        "Stream": CudaStream,
        "Event": CudaStream,
        "current_stream": lambda device=None: CudaStream(),
        "default_stream": lambda device=None: CudaStream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        for name, fake in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(torch._C, "_InferenceMode", _NoGradInstead))
        stack.enter_context(mock.patch.object(torch, "Generator", _OfTheCpu))
        for name in ("get_rng_state", "set_rng_state"):
            stack.enter_context(mock.patch.object(torch.cuda.random, name, cuda[name]))
        for name in ("range_push", "range_pop"):
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name, lambda *text: None))
        # A parameter that moves changes its class.
        stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", _swapped))
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        stack.enter_context(Dispatch())
        stack.enter_context(Functions())
        yield STATE.ledger
        STATE.stream.end()
