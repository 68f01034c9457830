"""Megatron-Core on a machine without CUDA: the CUDA calls it makes unconditionally, answered for the CPU.

Megatron-Core asks for the current CUDA device wherever it allocates a buffer, names "cuda" in its optimizers, and
draws dropout from CUDA's random state. Its tensors go where the first two say, so naming the CPU there is enough; the
CPU's generator stands in for CUDA's; a synchronisation has nothing to wait for; the optimizers' checks for the type
"torch.cuda.FloatTensor" are given that name. Nothing is replaced where CUDA is present.
Written against megatron-core 0.16.1 with its local layers (no Transformer Engine).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FACTORIES = ("tensor", "zeros")


def install() -> bool:
    """Answer Megatron-Core's CUDA calls for the CPU in this process; call it before building a model (idempotent).

    Returns whether the answers are in force: False, and nothing is changed, where CUDA is available.
    """
    if torch.cuda.is_available():
        return False
    from megatron.core.tensor_parallel import random as megatron_random

    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state()),
        (
            megatron_random,
            "_get_cuda_rng_state",
            lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
        ),
        (megatron_random, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)),
    ]
    if not hasattr(Tensor.type, "__wrapped__"):  # wrapping twice would name a type twice
        answers.append((Tensor, "type", _named_as_cuda(Tensor.type)))
        answers += [(torch, name, _cuda_means_cpu(getattr(torch, name))) for name in FACTORIES]
    for owner, name, answer in answers:
        setattr(owner, name, answer)
    return True


def _cuda_means_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`factory` with device="cuda" read as the CPU; every other device is passed on as it is."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return on_cpu


def _named_as_cuda(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type` that names a CPU tensor as its CUDA counterpart; with a type to convert to it is unchanged."""

    @functools.wraps(tensor_type)
    def named(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return named
