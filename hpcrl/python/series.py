"""The metrics of a run as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas


class MetricArrays(Mapping[str, NDArray[np.float64]]):
    """Metric -> float64 [rows], NaN where a step has no value or one that was not finite. `steps` is int64 [rows],
    ascending; step 0 is the evaluation before the first step."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        """`rows` as of hpcrl.metrics.log.read_metrics(); the last row of a step counts."""
        by_step = {int(row["step"]): row for row in rows}
        self.steps: NDArray[np.int64] = np.array(sorted(by_step), dtype=np.int64)
        self._rows = [by_step[step] for step in self.steps.tolist()]
        names = dict.fromkeys(name for row in self._rows for name in row if name != "step")
        self._names = sorted(names)

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        if name not in self._names:
            raise KeyError(name)
        return np.array([_number(row.get(name)) for row in self._rows], dtype=np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        span = f"steps {self.steps[0]} to {self.steps[-1]}" if len(self.steps) else "no step yet"
        return f"<{len(self)} metrics, {span}>"

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame with a column for each metric, indexed by step. ImportError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas, which hpcrl does not install: pip install pandas") from error
        return pandas.DataFrame(dict(self), index=pandas.Index(self.steps, name="step"))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
