"""The tests' own tokenizer, and files written from rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(TinyModel(hidden_size=16, num_heads=2), folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(name: str, *rows: Any) -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write
