"""The committed table of waits and copies, waits.txt: when, what, where, how often, and why.

A line: during | what | function of hpcrl | times with FEW layers | more per layer | reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.gpu_rehearsal.parts import FEW, MORE, Result

FILE = Path(__file__).with_name("waits.txt")
NO_REASON = "?"
HEAD = """\
# What makes the host wait for the device, and what is copied between them, on the rank that does most of it: with
# models of 2 layers, 4 sequences in 2 micro-batches and 4 requests. Rewrite it with
#     python -m tests.gpu_rehearsal
# which keeps the reasons; a ? in their place must be replaced.
"""


class Line(NamedTuple):
    during: str
    what: str
    place: str
    times: int
    per_layer: float
    reason: str = NO_REASON

    @property
    def key(self) -> tuple[str, str, str]:
        return self[:3]

    @property
    def counted(self) -> Line:
        return self._replace(reason="")


def lines_of(results: Iterable[Result], reasons: dict[tuple[str, str, str], str] | None = None) -> Iterator[Line]:
    """The lines of a part, from the results of its ranks."""
    most: dict[int, Counter[tuple[str, str, str]]] = {FEW: Counter(), MORE: Counter()}
    for result in results:
        for layers, sections in result.counted.items():
            for during, counts in sections.items():
                most[layers] |= Counter({(during, what, place): n for (place, what), n in counts.items()})
    for key in sorted(most[FEW] | most[MORE]):
        few, more = most[FEW][key], most[MORE][key]
        yield Line(*key, few, (more - few) / (MORE - FEW), (reasons or {}).get(key, NO_REASON))


def read() -> list[Line]:
    rows = [row for row in FILE.read_text().splitlines() if row and not row.startswith("#")] if FILE.exists() else []
    fields = [[word.strip() for word in row.split("|")] for row in rows]
    return [Line(f[0], f[1], f[2], int(f[3]), float(f[4]), f[5]) for f in fields]


def text(lines: Iterable[Line]) -> str:
    rows = [[line.during, line.what, line.place, str(line.times), f"{line.per_layer:g}", line.reason] for line in lines]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    padded = (" | ".join([*(word.ljust(width) for word, width in zip(row, widths)), row[5]]) for row in rows)  # noqa: B905
    return HEAD + "\n".join(padded) + "\n"
