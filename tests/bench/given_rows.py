"""Models and words that benches give to hpcrl and TRL to train on the same sequences, and TRL's turn."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from tests.bench.vs_trl import LIMIT_S, TRL_BIN

PROGRAM = Path(__file__).resolve().parent / "trl" / "run_given.py"
LR = 1e-5
SMALL: dict[str, Any] = {  # its vocabulary has 8 % of the multiplications, as that of a model of 7B
    "hidden_size": 256,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "intermediate_size": 768,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
}


def make_model(folder: Path, **changes: Any) -> Path:
    """A folder with a model of random weights."""
    make_tiny_model(TinyModel(**{**SMALL, **changes}), folder)
    return folder


class Words:
    """Random text of a tokenizer's words, one token each."""

    def __init__(self, model: Path, seed: int = 0):
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        words = [self.tokenizer.decode([token]) for token in range(len(self.tokenizer))]
        self._words = [word for word in words if word.startswith(" ") and word.strip().isalpha()]
        self._random = random.Random(seed)

    def text(self, least: int, most: int) -> str:
        """A text of a number of words drawn uniformly from least to most."""
        return "".join(self._random.choice(self._words) for _ in range(self._random.randint(least, most))).strip()

    def asked(self, prompt: str) -> str:
        """The prompt as the chat template renders it."""
        chat = [{"role": "user", "content": prompt}]
        text: str = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return text

    def count(self, text: str) -> int:
        return len(self.tokenizer(text)["input_ids"])


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_trl(trainer: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The report of tests/bench/trl/run_given.py. RuntimeError holds the end of its output."""
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [str(TRL_BIN / "python"), str(PROGRAM), "--trainer", trainer, "--lr", str(LR), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"TRL ended with {done.returncode}:\n{done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4 if name == "loss" else 1) for name, value in figures.items()}
