from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.config import TinyModel
from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.gen.generation_engine import GenEngine
from hpcrl.engines.tiny import make_tiny_model
from tests.contracts.gen import MAX_LENGTH, VOCAB, Engines

CACHE_BYTES = 1 << 24
# vLLM's attention on a CPU without AVX-512 refuses the default's 16 numbers per head.
MODEL = TinyModel(vocab_size=VOCAB, hidden_size=64, num_heads=2, num_kv_heads=1)


def factory(tmp: Path) -> Engines:
    pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM

    from hpcrl.engines.gen.vllm.engine import VLLMEngine

    make_tiny_model(MODEL, tmp / "model")

    def build(
        max_num_seqs: int, load: bool, folder: Path = tmp / "model", routes: RouteShape | None = None
    ) -> GenEngine:
        return VLLMEngine(
            folder,
            max_num_seqs=max_num_seqs,
            max_length=MAX_LENGTH,
            dtype="float32",
            cache_bytes=CACHE_BYTES,
            routes=routes,
            load=load,
            sleeps=True,
        )

    weights = AutoModelForCausalLM.from_pretrained(tmp / "model").state_dict()
    del weights["lm_head.weight"]  # tied to the embedding
    return Engines(
        build, list(weights.items()), functools.partial(_recording, tmp / "experts", build), close=leave_groups
    )


def _recording(folder: Path, build: Callable[..., GenEngine]) -> tuple[GenEngine, RouteShape]:
    make_tiny_model(MODEL.model_copy(update={"architecture": "qwen3_moe", "num_experts": 5}), folder)
    shape = RouteShape(num_layers=2, experts_per_token=2, num_experts=5)
    return build(2, True, folder, shape), shape


def leave_groups() -> None:
    """End the process groups that vLLM made in this process, the default group among them."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
