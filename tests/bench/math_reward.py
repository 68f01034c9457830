"""How fast the maths reward compares: responses per CPU-second, by the kind of answer. Prints one JSON line.

    python -m tests.bench.math_reward

Every response is a sentence with its answer in a box; every second one is wrong, and no two gold answers are the same.
Numbers and fractions are compared by hpcrl's own rules, polynomials by math-verify, which expands them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from hpcrl.config import RewardConfig
from hpcrl.rewards.base import RewardItem
from hpcrl.rewards.math import MathReward
from tests.bench.machine import tell

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


def main() -> None:
    """Print the JSON line."""
    reward = MathReward(RewardConfig(name="math"))
    for kind in KINDS:
        rate(reward, kind, 0)  # imports sympy
    rates = {kind: [rate(reward, kind, turn) for turn in range(1, TURNS + 1)] for kind in KINDS}
    medians = {f"{kind}_per_cpu_s": round(statistics.median(found), 1) for kind, found in rates.items()}
    tell({"bench": "math_reward", "turns": TURNS, **medians})


if __name__ == "__main__":
    main()
