"""The real SGLang on a CPU (tests/sglang_cpu). A server takes 20 s to start, so the tests share two."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import TinyModel
from hpcrl.engines.gen.generation_engine import GenEngine
from hpcrl.engines.tiny import make_tiny_model
from tests.contracts.gen import MAX_LENGTH, VOCAB, Engines, NamedWeights

MODEL = TinyModel(vocab_size=VOCAB)
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_cpu_models",  # else SGLang imports every model that it knows
    "TORCHDYNAMO_DISABLE": "1",  # it compiles parts of itself, which takes longer than the tests
}
OPTIONS = {"device": "cpu", "attention_backend": "torch_native"}
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_length": MAX_LENGTH, "dtype": "float32", "cache_tokens": 1024}


def factory(tmp: Path) -> Engines:
    pytest.importorskip("sglang", reason="SGLang is not installed; make test-outside")
    weights = weights_of(make_model(tmp / "model"))

    def build(max_num_seqs: int, load: bool) -> GenEngine:
        engine = make_engine(tmp / "model", max_num_seqs=max_num_seqs)
        if load:
            engine.load_weights(weights, 0)
        return engine

    return Engines(build, weights)


def make_model(folder: Path) -> Path:
    make_tiny_model(MODEL, folder)
    return folder


def weights_of(folder: Path, scale: float = 1.0) -> NamedWeights:
    """The weights that training sends, without a tied head."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return [(name, scale * parameter.detach()) for name, parameter in model.named_parameters()]


def make_engine(folder: Path, **settings: Any) -> Any:
    """SGLangEngine without weights; without `start` it uses a shared server, so its model must be MODEL."""
    from hpcrl.engines.gen.sglang.engine import SGLangEngine

    options = OPTIONS | settings.pop("options", {})
    return SGLangEngine(folder, **{"start": shared, "load": False, **LIMITS, **settings, "options": options})


def own(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """A server for one engine."""
    from hpcrl.engines.gen.sglang.child import Child

    return Child(arguments, {**ENVIRONMENT, **environment}, start_s=280.0, call_s=60.0)


class Shared:
    """A server for one engine after another. asked: the calls with their arguments."""

    def __init__(self, server: Any):
        self._server = server
        self.asked: list[tuple[Any, ...]] = []

    def call(self, name: str, *arguments: Any) -> Any:
        self.asked.append((name, *arguments))
        return self._server.call(name, *arguments)

    def close(self) -> None:
        """The server stays up: nothing runs in it between two calls."""


SERVERS: list[Any] = []


def shared(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Shared:
    """A server with enough slots for any engine, alternating between two: no test has more engines at once."""
    if len(SERVERS) < 2:
        given = {"max_running_requests": LIMITS["max_num_seqs"], "enable_memory_saver": False}  # which takes CUDA
        SERVERS.append(own({**arguments, **given}, environment))
        atexit.register(SERVERS[-1].close)
    else:
        SERVERS.append(SERVERS.pop(0))
    return Shared(SERVERS[-1])
