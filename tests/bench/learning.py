"""What the benches of learning share: runs that are not repeated once their lines are in a file, their curves, and
tables of several seeds."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hpcrl.metrics.log import read_metrics

Line = Mapping[str, Any]
"""What is kept of a run: what names it, numbers, and figures by step."""


def completed(
    out: Path, names: Sequence[str], todo: Iterable[tuple[Any, ...]], run: Callable[..., Line], jobs: int
) -> list[Line]:
    """All lines of `out`, to which those runs of `todo` are appended that it lacks, `jobs` at a time. names: the fields
    that tell runs apart, in the order of the arguments of `run`."""
    lines: list[Line] = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {tuple(line[name] for name in names) for line in lines}
    lock = threading.Lock()

    def one(which: tuple[Any, ...]) -> None:
        line = run(*which)
        with lock, out.open("a") as file:  # here, so that one that fails costs none that has ended
            lines.append(line)
            file.write(json.dumps(line) + "\n")

    with ThreadPoolExecutor(jobs) as pool:
        [*pool.map(one, [which for which in todo if which not in done])]
    return lines


@contextlib.contextmanager
def run_folder(kept: Path | None) -> Iterator[Path]:
    """Where runs are written: a folder to keep, or one that is removed in the end."""
    with tempfile.TemporaryDirectory() as removed:
        folder = (kept or Path(removed)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def curves(run_dir: Path, figures: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """figure -> step -> value of a metric, without the steps that lack it, and without metrics that no step has."""
    rows = read_metrics(run_dir)
    found = {figure: _curve(rows, key) for figure, key in figures.items()}
    return {figure: curve for figure, curve in found.items() if curve}


def _curve(rows: list[dict[str, float | None]], key: str) -> dict[str, float]:
    return {str(int(row["step"] or 0)): round(value, 4) for row in rows if (value := row.get(key)) is not None}


def ends(line: Line, figure: str) -> tuple[float, float]:
    """The first and the last value of a curve."""
    values = list(line[figure].values())
    return values[0], values[-1]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean; of several seeds also the lowest and the highest."""
    shown = f"{statistics.mean(values):.{digits}f}"
    return f"{shown} ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else shown


def mean_curve(lines: Sequence[Line], figure: str) -> dict[int, float]:
    """The mean over runs at the steps that all of them have."""
    found = [line[figure] for line in lines]
    steps = [step for step in found[0] if all(step in curve for curve in found)]
    return {int(step): statistics.mean(curve[step] for curve in found) for step in steps}


def grouped(lines: Iterable[Line], *names: str) -> dict[tuple[Any, ...], list[Line]]:
    """The lines by the values of fields, in order of their appearance."""
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(line[name] for name in names), []).append(line)
    return found


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, whose first row is its head."""
    written = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([written[0], "|" + "---|" * len(rows[0]), *written[1:]])
