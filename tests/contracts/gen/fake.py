from __future__ import annotations

from pathlib import Path

import torch

from hpcrl.engines.gen.fake_generator.engine import FakeEngine
from hpcrl.engines.gen.generation_engine import GenEngine
from tests.contracts.gen import MAX_LENGTH, VOCAB, Engines


def factory(tmp: Path) -> Engines:
    weights = [("a", torch.ones(2, 3)), ("b", torch.zeros(4))]

    def build(max_num_seqs: int, load: bool) -> GenEngine:
        engine = FakeEngine(
            max_num_seqs=max_num_seqs,
            max_length=MAX_LENGTH,
            vocab_size=VOCAB,
            lengths=lambda request: request.params.max_new_tokens,
            shapes={name: tuple(tensor.shape) for name, tensor in weights},
        )
        if load:
            engine.load_weights(weights, version=0)
        return engine

    return Engines(build, weights)
