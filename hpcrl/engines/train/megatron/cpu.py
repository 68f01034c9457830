"""Run Megatron-Core on a machine without CUDA: redirect its unconditional CUDA calls to the CPU.

Megatron-Core requests the current CUDA device wherever it allocates a buffer, uses "cuda" in its schedules and
optimizers, and draws from CUDA's random state. For its tensors, it is enough to return the CPU as current device. The
CPU's random generator replaces CUDA's; streams and events do nothing; and tensors report the type
"torch.cuda.FloatTensor", for which the optimizers check. Written for megatron-core 0.16.1 with its local layers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device
from torch import Tensor

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")


def install() -> bool:
    """Redirect Megatron-Core's CUDA calls to the CPU in this process; call it before a model is built (idempotent).

    Returns whether calls are redirected. If CUDA is available, returns False and changes nothing.
    """
    if torch.cuda.is_available():
        return False
    if hasattr(Tensor.type, "__wrapped__"):  # wrapping twice would change the name twice
        return True
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # `with torch.device(...)` finds torch's functions in a table that it creates on first use.
    torch.utils._device._device_constructors()
    cpu = torch.device("cpu")
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: cpu),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state()),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.cuda, "current_stream", lambda device=None: _Stream()),
        (torch.cuda, "default_stream", lambda device=None: _Stream()),
        (torch.cuda, "stream", _no_stream),
        (torch.cuda.nvtx, "range_push", lambda text: None),
        (torch.cuda.nvtx, "range_pop", lambda: None),
        (
            megatron_random,
            "_get_cuda_rng_state",
            lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
        ),
        (megatron_random, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)),
        # Without Transformer Engine, a router that computes in fp32 still looks up one of its functions.
        (moe_utils, "te_general_gemm", None),
        # Latent attention treats an importable module as Transformer Engine itself.
        (multi_latent_attention, "HAVE_TE", False),
        # Otherwise, a tensor on the CPU would be treated as offloaded, and not converted.
        (token_dispatcher, "maybe_move_tensor_to_cpu", _moved),
        # Gloo exchanges only parts of one size.
        (mappings, "_gather_along_first_dim", _gathers_any_sizes(mappings._gather_along_first_dim)),
        (mappings, "_reduce_scatter_along_first_dim", _scatters_any_sizes(mappings._reduce_scatter_along_first_dim)),
        (Tensor, "cuda", lambda self, *args, **kwargs: self),
        (Tensor, "type", _named_as_cuda(Tensor.type)),
        *((torch, name, _cuda_means_cpu(getattr(torch, name))) for name in FACTORIES),
    ]
    for owner, name, answer in answers:
        setattr(owner, name, answer)
    return True


class _Stream:
    """Replaces a stream or an event, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass

    wait_event = wait = record = wait_stream


@contextlib.contextmanager
def _no_stream(stream: Any) -> Iterator[None]:
    yield


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _gathers_any_sizes(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's gather of the first dimension, also for parts of different sizes."""

    def gathered(own: Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None:
            return gather(own, group, sizes, use_global_buffer)
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gathered


def _scatters_any_sizes(scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's reduce-scatter of the first dimension, also for parts of different sizes."""

    def scattered(own: Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None:
            return scatter(own, group, sizes, use_global_buffer)
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total.split(sizes)[dist.get_rank(group)]

    return scattered


def _cuda_means_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`factory` with device="cuda" replaced by the CPU; all other devices are passed through."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return on_cpu


def _named_as_cuda(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type` that reports a CPU tensor's type as its CUDA counterpart; conversions to a type are unchanged."""

    @functools.wraps(tensor_type)
    def named(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return named
