"""How a training engine splits its work in the tests: the table of docs/engines.md, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.config import Config, parse
from tests.engines.worlds import make_model_folder


@dataclass(frozen=True)
class Split:
    """A model on a number of ranks."""

    num_ranks: int
    section: Mapping[str, Any] = field(default_factory=dict)
    """Keys of trainer.ENGINE."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Keys of trainer."""
    family: str = "qwen2"
    model: Mapping[str, Any] = field(default_factory=dict)
    """Changes of its configuration."""

    def make_model(self, folder: Path) -> Path:
        """Write the model, once."""
        return folder if folder.exists() else make_model_folder(self.family, folder, **self.model)

    def config(self, engine: str, model: Path) -> Config:
        """The configuration of a run with this split. All micro-batches are given by hand."""
        return parse(
            {
                "model": {"path": str(model), "dtype": "float32"},
                "trainer": {
                    "engine": engine,
                    "param_dtype": "float32",
                    "lr": 1e-2,
                    "max_grad_norm": 100.0,
                    "eps": 1.0,  # so an update is smooth in the gradient and can be compared
                    "weight_decay": 0.5,
                    "logits_chunk_tokens": 8,
                    engine: dict(self.section),
                    **self.trainer,
                },
                "layout": {"trainer": {"num_ranks": self.num_ranks}},
            }
        )
