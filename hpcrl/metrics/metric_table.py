"""metrics.jsonl as columns of numbers, read on from where the last reading ended."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.metrics.log import name_now
from hpcrl.system.files import open_regular

PROOF_BYTES = 512
"""The end of what was read; if it has changed, the file is read again."""


class MetricColumn(NamedTuple):
    """A metric's values: `steps` int64 [k] of the rows that have it, `rows` int64 [k] their numbers, and `values`
    float64 [k], NaN for null."""

    steps: NDArray[np.int64]
    rows: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass
class _Block:
    """Rows with the same names: `values` has one number for each name and row."""

    names: list[str]
    rows: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class MetricTable:
    """Rows of metrics.jsonl under the names of this version, eight bytes for each number."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._blocks: dict[tuple[str, ...], _Block] = {}

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> MetricTable:
        """The table of some rows."""
        table = cls()
        for row in rows:
            table.add(row)
        return table

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row; one without a step, an integer, is left out. What is no number counts as null."""
        step = row.get("step")
        if not isinstance(step, int) or step.bit_length() > 63:
            return
        block = self._blocks.get(names := tuple(row))
        if block is None:
            block = self._blocks[names] = _Block([name_now(name) for name in names])
        length = len(block.values)
        try:
            block.values.extend(row.values())
        except (TypeError, OverflowError):
            del block.values[length:]
            block.values.extend(map(_number, row.values()))
        block.rows.append(len(self._steps))
        self._steps.append(step)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._steps)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps of all rows, in the file's order."""
        return np.array(self._steps)

    @property
    def last_step(self) -> int:
        """The last row's step, 0 without rows."""
        return self._steps[-1] if self._steps else 0

    @property
    def num_bytes(self) -> int:
        """Memory of the numbers."""
        return 8 * sum(len(block.values) for block in self._blocks.values())

    def names(self) -> list[str]:
        """All metrics, as they first appear."""
        return list(dict.fromkeys(name for block in self._blocks.values() for name in block.names if name != "step"))

    def column(self, name: str) -> MetricColumn:
        """The values of a metric, in the order of rows; empty if there is none of this name."""
        rows, values = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for block in self._blocks.values():
            if name in block.names:
                place = (
                    len(block.names) - 1 - block.names[::-1].index(name)
                )  # an old name's metric may have the new one
                rows.append(np.array(block.rows))
                values.append(np.array(block.values).reshape(-1, len(block.names))[:, place])
        number = np.concatenate(rows)
        order = number.argsort(kind="stable")
        number = number[order]
        return MetricColumn(self.steps[number], number, np.concatenate(values)[order])

    def dense(self, name: str) -> NDArray[np.float64]:
        """float64 [rows]: the metric in each row, 0 where it is missing or not finite."""
        found, column = np.zeros(len(self)), self.column(name)
        found[column.rows] = np.nan_to_num(column.values, nan=0.0, posinf=0.0, neginf=0.0)
        return found


class MetricsReader:
    """Reads a metrics.jsonl into a table; again, only the lines that were added since."""

    def __init__(self, path: Path):
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self.table = MetricTable()
        self._end, self._proof, self._file = 0, b"", (0, 0)

    def read(self) -> MetricTable:
        """The file's rows; none without a file. A line that is being written, and damaged lines, are left out. OSError
        if the file cannot be read."""
        try:
            with open_regular(self._path) as file:
                seen = os.fstat(file.fileno())
                file.seek(self._end - len(self._proof))
                if self._file != (seen.st_dev, seen.st_ino) or file.read(len(self._proof)) != self._proof:
                    self._forget()  # a resume has moved rows away, or another run is in this place
                    self._file = (seen.st_dev, seen.st_ino)
                    file.seek(0)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._end += len(line)
                    self._proof = line[-PROOF_BYTES:]
                    self._add(line)
        except (FileNotFoundError, NotADirectoryError):
            self._forget()
        return self.table

    def _add(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(row, dict):
            self.table.add(row)


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, (int, float)) else np.nan
    except OverflowError:  # a damaged line: an integer larger than every float
        return np.nan
