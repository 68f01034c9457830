"""How generation engines are built for their contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.gen.generation_engine import GenEngine

VOCAB = 320
MAX_LENGTH = 64
NamedWeights = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Engines:
    """How to build one kind of engine: build(max_num_seqs, load), and weights it accepts. `factory(folder)` of a module
    returns it; the engine has VOCAB tokens and sequences of up to MAX_LENGTH. close: called after the last test."""

    build: Callable[[int, bool], GenEngine]
    weights: NamedWeights
    recording: Callable[[], tuple[GenEngine, RouteShape]] | None = None
    """If the specification gives routes: a loaded engine of two slots that records them, and their shape."""
    close: Callable[[], None] = lambda: None
