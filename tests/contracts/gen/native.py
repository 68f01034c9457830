from __future__ import annotations

import functools
from pathlib import Path

import torch

from hpcrl.config import TinyModel
from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.gen.generation_engine import GenEngine
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.tiny import make_tiny_model
from tests.contracts.gen import MAX_LENGTH, VOCAB, Engines


def factory(tmp: Path) -> Engines:
    from transformers import AutoModelForCausalLM

    make_tiny_model(TinyModel(vocab_size=VOCAB), tmp / "model")

    def build(max_num_seqs: int, load: bool) -> GenEngine:
        return NativeEngine(
            tmp / "model",
            max_num_seqs=max_num_seqs,
            max_length=MAX_LENGTH,
            dtype=torch.float32,
            block_tokens=8,
            load=load,
        )

    weights = AutoModelForCausalLM.from_pretrained(tmp / "model").state_dict()
    del weights["lm_head.weight"]  # tied to the embedding, which would replace it
    return Engines(build, list(weights.items()), functools.partial(_recording, tmp / "experts"))


def _recording(folder: Path) -> tuple[GenEngine, RouteShape]:
    make_tiny_model(TinyModel(vocab_size=VOCAB, architecture="qwen3_moe", num_experts=5), folder)
    shape, dtype = RouteShape(num_layers=2, experts_per_token=2, num_experts=5), torch.float32
    return NativeEngine(folder, max_num_seqs=2, max_length=MAX_LENGTH, dtype=dtype, routes=shape), shape
