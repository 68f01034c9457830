"""Rows for docs/distillation.md: prompts whose answers only a teacher can read, and rows of answers for a warm start
that copies an answer from its prompt. `python -m tests.bench.hidden_digits FOLDER` writes digits.jsonl and
warm.jsonl."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

DIGITS = "0123456789"


def main(folder: Path) -> None:
    """Write 64 prompts `digit N`, each with a random digit, and 4,000 rows of answers, of which 60 % have the digit in
    the prompt."""
    rng = random.Random(0)
    rows = [{"prompt": f"digit {i}", "answer": rng.choice(DIGITS)} for i in range(64)]
    warm = []
    for _ in range(4000):
        number, digit = rng.randrange(64), rng.choice(DIGITS)
        shown = rng.random() < 0.6
        answer = digit if shown else rng.choice(DIGITS)
        warm.append({"prompt": f"digit {number} is {digit}" if shown else f"digit {number}", "answer": answer})
    for name, given in (("digits", rows), ("warm", warm)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
