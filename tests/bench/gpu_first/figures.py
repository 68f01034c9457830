"""A figure beside what was expected of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.bench.gpu.common import Row


class Expect(NamedTuple):
    """Bounds of a figure; of_limit: of its share of the limit that comes with it. No GPU has measured any of them:
    limits are arithmetic or a plan, shares and seconds are guesses."""

    low: float | None = None
    high: float | None = None
    of_limit: bool = False


EXPECTED = {
    "mean difference, bf16 head": Expect(high=0.05),
    "mean difference, fp32 head": Expect(high=0.05),
    "run: steps": Expect(4, 4),
    "run: resumes": Expect(1, 1),
    "difference of probabilities": Expect(high=0.01),
    "KL of log-probs": Expect(high=0.001),
    "gradient norm": Expect(low=1e-9),
    "metrics that differ": Expect(high=0),
    "weights that differ": Expect(high=0),
    "places that the table lacks": Expect(high=0),
    "places of the table that did not occur": Expect(high=0),
}
"""By the end of "STEP: LABEL PART: WHAT"; the longest that fits counts."""
RATES = {
    "driver": Expect(low=580),
    "first kernel": Expect(high=20),
    "weights to the generator": Expect(0.25, 1.1, of_limit=True),
    "to make and connect a group": Expect(high=3, of_limit=True),
    "rate, of a product's": Expect(0.3, 1, of_limit=True),
    "first offload": Expect(low=1),
    "offload": Expect(low=10),
    "onload": Expect(low=10),
    "peak, of the plan's": Expect(high=1.1, of_limit=True),
    "vllm: cold seconds": Expect(high=300),
    "vllm: warm seconds": Expect(high=120),
    "start seconds": Expect(high=240),
    "resume seconds": Expect(high=150),
    "run: of a step": Expect(high=45),
    "run: peak in training": Expect(high=1.1, of_limit=True),
    "first seconds": Expect(high=90),
    "second seconds": Expect(high=90),
    "responses": Expect(0.2, 1, of_limit=True),
    "sleep": Expect(high=10),
    "wake and load": Expect(high=15),
}
"""The same of figures that mean something on a GPU alone."""


@dataclass(frozen=True)
class Figure:
    """within: whether the value is as expected; None without an expectation."""

    what: str
    value: float | None
    unit: str = ""
    expected: str = ""
    within: bool | None = None
    note: str = ""


def figure_of(row: Row, step: str, label: str, tiny: bool) -> Figure:
    """A row of the command with this label, judged by what is expected, else by its own verdict."""
    what = " ".join(filter(None, (label, f"{row.part}: {row.what}".strip(": "))))
    expects = EXPECTED if tiny else EXPECTED | RATES
    ends = [end for end in expects if f"{step}: {what}".endswith(end)]
    if ends and row.value is not None:
        about = _judged(row.value, row, expects[max(ends, key=len)])
    else:
        words = f"limit {row.limit:.4g}" if row.limit is not None else ""
        about = {"expected": words, "within": {"ok": True, "bad": False, "failed": False}.get(row.verdict)}
    note = " ".join(filter(None, (row.verdict if row.verdict not in ("ok", "bad") else "", row.note)))
    return Figure(what, row.value, row.unit, note=note, **about)


def _judged(value: float, row: Row, expect: Expect) -> dict[str, Any]:
    """The expectation in words, and whether it holds."""
    scale = row.limit if expect.of_limit else 1.0
    if scale is None:
        return {"expected": "no limit to compare with"}
    low, high = (None if bound is None else bound * scale for bound in (expect.low, expect.high))
    words = [f"at least {low:.4g}"] if low is not None else []
    words += [f"at most {high:.4g}"] if high is not None else []
    within = (low is None or value >= low) and (high is None or value <= high) and row.verdict != "bad"
    return {"expected": f"{low:.4g}" if low == high else ", ".join(words), "within": within}
