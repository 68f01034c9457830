"""How fast the maths reward compares: responses per CPU-second, by the kind of answer. Prints one JSON line.

    python -m tests.bench.math_reward [--data FOLDER]      the folder that has gsm8k/train.jsonl and gsm8k/test.jsonl

All solutions of GSM8K, each against its own gold answer or, every second one, against that of the next row; then again
with one of the tests' hostile answers in place of every hundredth. The slowest checks, in CPU-seconds: of these, and of
the hostile answers against a formula, for which math-verify may work up to the limit.

Then by the kind of answer. Every response is a sentence with its answer in a box; every second one is wrong, and no two
gold answers are the same. Numbers and fractions are compared by hpcrl's own rules, polynomials by math-verify, which
expands them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

from hpcrl.config import RewardConfig
from hpcrl.rewards.builtin.math import MathReward
from hpcrl.rewards.grading.equality import LIMIT_S
from hpcrl.rewards.reward import RewardItem
from tests.bench.machine import tell
from tests.rewards.test_math import HOSTILE

TURNS = 5


def number(n: int, off: int) -> tuple[str, str]:
    """(given, gold), as of the other kinds."""
    return f"{n + off:,}", str(n)


def fraction(n: int, off: int) -> tuple[str, str]:
    return rf"\frac{{{2 * n + off}}}{{{2 * n + 2}}}", f"{n}/{n + 1}"


def polynomial(n: int, off: int) -> tuple[str, str]:
    return f"(x+{n})^3", f"x^3+{3 * n}x^2+{3 * n * n}x+{n**3 + off}"


KINDS: dict[str, tuple[Callable[[int, int], tuple[str, str]], int]] = {
    "numbers": (number, 5000),
    "fractions": (fraction, 1000),
    "polynomials": (polynomial, 20),
}
"""Kind -> its answers, and how many are compared in a turn."""


def rate(reward: MathReward, kind: str, turn: int) -> float:
    """Responses per CPU-second of this process."""
    make, count = KINDS[kind]
    items = []
    for n in range(count):
        given, gold = make(1000 + turn * count + n, n % 2)
        items.append(RewardItem(n, "maths", "", rf"First this, then that. So it is $\boxed{{{given}}}$.", gold, {}))
    start = time.process_time()
    scores = reward.score(items)
    seconds = time.process_time() - start
    assert [(score.reward, score.error) for score in scores] == [(1.0 - n % 2, "") for n in range(count)], kind
    return count / seconds


def gsm8k(folder: Path) -> list[tuple[str, str]]:
    """(response, gold) of all rows."""
    lines = [line for name in ("train", "test") for line in (folder / f"gsm8k/{name}.jsonl").read_text().splitlines()]
    golds = [json.loads(line)["answer"] for line in lines]
    return [(golds[n], golds[(n + n % 2) % len(golds)]) for n in range(len(golds))]


def checks(reward: MathReward, pairs: list[tuple[str, str]], hostile_every: int | None) -> tuple[float, float]:
    """(checks per CPU-second, CPU seconds of the slowest check)."""
    hostile = cycle(HOSTILE)
    seconds = []
    for n, (response, gold) in enumerate(pairs):
        if hostile_every and n % hostile_every == 0:
            response = rf"So it is $\boxed{{{next(hostile)}}}$."
        start = time.process_time()
        (score,) = reward.score([RewardItem(n, "maths", "", response, gold, {})])
        seconds.append(time.process_time() - start)
        assert score.reward in (0.0, 1.0)
    return len(pairs) / sum(seconds), max(seconds)


def main() -> None:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("HPCRL_DATA", "../shared/data")))
    pairs = gsm8k(parser.parse_args().data)
    reward = MathReward(RewardConfig(name="math"))
    for kind in KINDS:
        rate(reward, kind, 0)  # imports sympy
    plain, _ = checks(reward, pairs, None)
    mixed, slowest = checks(reward, pairs, 100)
    _, against_formula = checks(reward, [("", "x+1")] * len(HOSTILE), 1)
    rates = {kind: [rate(reward, kind, turn) for turn in range(1, TURNS + 1)] for kind in KINDS}
    medians = {f"{kind}_per_cpu_s": round(statistics.median(found), 1) for kind, found in rates.items()}
    found: dict[str, float] = {
        "pairs": len(pairs),
        "plain_per_cpu_s": round(plain),
        "hostile_1_percent_per_cpu_s": round(mixed),
    }
    found |= {"slowest_cpu_s": round(slowest, 2), "slowest_against_a_formula_cpu_s": round(against_formula, 2)}
    tell({"bench": "math_reward", **found, "limit_cpu_s": LIMIT_S, **medians})


if __name__ == "__main__":
    main()
