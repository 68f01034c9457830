"""A model and data for whole runs in seconds, on which rewards differ, so that there is something to learn."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from tests.e2e.program import Start

DIGITS = ("0", "1", "2")


@pytest.fixture(autouse=True)
def no_run_is_left() -> Iterator[None]:
    """A failed test leaves no run that would occupy the cores during the next."""
    yield
    Start.kill_left()


@pytest.fixture(scope="session")
def digit_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 prompts whose answers are a digit of DIGITS that cannot be guessed."""
    path = tmp_path_factory.mktemp("data") / "digits.jsonl"
    rng = random.Random(0)
    rows = [{"prompt": f"digit {i}", "answer": rng.choice(DIGITS)} for i in range(64)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def digit_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF folder of a tiny model that answers every prompt, and asks to think again, with some digit of DIGITS."""
    return _make_digit_model(tmp_path_factory.mktemp("model") / "digits", hidden_size=32)


@pytest.fixture(scope="session")
def wide_digit_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with 32 numbers per head, the fewest that vLLM's attention takes on a CPU without AVX-512."""
    return _make_digit_model(tmp_path_factory.mktemp("model") / "wide_digits", hidden_size=64)


@pytest.fixture(scope="session")
def program_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF folder of a tiny model that answers every prompt with a program that prints some digit of DIGITS."""
    return _make_digit_model(tmp_path_factory.mktemp("model") / "programs", hidden_size=32, answer="print({})")


@pytest.fixture(scope="session")
def walker_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF folder of a tiny model that answers every prompt with some direction."""
    folder = tmp_path_factory.mktemp("model") / "walker"
    return _make_digit_model(folder, hidden_size=32, choices=("Up", "Down", "Left", "Right"))


def _make_digit_model(folder: Path, hidden_size: int, answer: str = "{}", choices: Sequence[str] = DIGITS) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tiny_model(TinyModel(hidden_size=hidden_size, num_heads=2, num_kv_heads=1, intermediate_size=64), folder)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    rng = random.Random(1)

    def dialogue() -> str:
        turns = [{"role": "user", "content": f"digit {rng.randrange(64)}"}]
        turns += [{"role": "assistant", "content": answer.format(rng.choice(choices))}]
        turns += [{"role": "user", "content": "check it and answer again"}]
        turns += [{"role": "assistant", "content": answer.format(rng.choice(choices))}]
        return tokenizer.apply_chat_template(turns, tokenize=False)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(200):
        batch = tokenizer([dialogue() for _ in range(16)], padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        if step >= 60 and loss < 0.25:  # the wide model takes more steps, how many depends on the processor
            break
        optimizer.step()
    model.save_pretrained(folder)
    return folder
