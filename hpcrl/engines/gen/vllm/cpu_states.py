"""Mamba-2 states in vLLM's CPU build."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def states_at_chunk_ends() -> Iterator[None]:
    """Context in which an engine on a CPU is made, so that it ends a chunk of the prompt where the prefix cache needs a
    state. vLLM 0.32 takes that state from inside a chunk, which its scan for CPUs does not return, and fails with an
    IndexError for prompts of more than one block."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    with mock.patch.object(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec):
        yield
