"""SGLang's stand-in (tests/sglang_standin), in this process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.config import TinyModel
from hpcrl.engines.gen.base import GenEngine
from hpcrl.engines.tiny import make_tiny_model
from tests.conftest import ROOT
from tests.contracts.gen import MAX_LENGTH, VOCAB, Engines

STANDIN = ROOT / "tests/sglang_standin"


def factory(tmp: Path) -> Engines:
    from transformers import AutoModelForCausalLM

    make_tiny_model(TinyModel(vocab_size=VOCAB), tmp / "model")
    weights = AutoModelForCausalLM.from_pretrained(tmp / "model").state_dict()
    del weights["lm_head.weight"]  # the same matrix as the embedding

    def build(max_slots: int, load: bool) -> GenEngine:
        return make_engine(tmp / "model", max_slots=max_slots, load=load)

    return Engines(build, list(weights.items()), close=forget)


def make_engine(folder: Path, **settings: Any) -> Any:
    """SGLangEngine with small limits; without `start`, SGLang is in this process."""
    from hpcrl.engines.gen.sglang.engine import SGLangEngine

    more = {"max_slots": 4, "max_length": MAX_LENGTH, "dtype": "float32", "start": start}
    return SGLangEngine(folder, **more | settings)


def start(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """A Server of the stand-in."""
    from hpcrl.engines.gen.sglang.server import Server

    sys.path.insert(0, str(STANDIN))
    try:
        return Server(arguments)
    finally:
        sys.path.remove(str(STANDIN))


def forget() -> None:
    """Import the stand-in no more."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
