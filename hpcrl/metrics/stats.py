"""Mergeable statistics, which ranks send instead of means, so results do not depend on how rows are split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Stat(NamedTuple):
    """Sum, weight, minimum and maximum of values; merging two Stats is exact."""

    total: float
    count: float  # type: ignore[assignment]  # tuple.count is never needed here
    low: float = math.inf
    high: float = -math.inf


Stats = dict[str, Stat]


def stat(values: Tensor, mask: Tensor | None = None) -> Stat:
    """Stat of a tensor's entries, or of the entries selected by a boolean mask."""
    values = values.detach()
    if mask is not None:
        values = values[mask]
    if values.numel() == 0:
        return Stat(0.0, 0.0)
    values = values.double()
    return Stat(values.sum().item(), float(values.numel()), values.min().item(), values.max().item())


def scalar(value: float) -> Stat:
    """Stat of one number."""
    return Stat(float(value), 1.0, float(value), float(value))


def merge(parts: Iterable[Mapping[str, Stat]]) -> Stats:
    """Merge the parts' Stats by name, in order of first appearance."""
    merged: Stats = {}
    for part in parts:
        for name, new in part.items():
            old = merged.get(name)
            merged[name] = (
                Stat(*new)
                if old is None
                else Stat(old.total + new[0], old.count + new[1], min(old.low, new[2]), max(old.high, new[3]))
            )
    return merged


def flatten(stats: Mapping[str, Stat]) -> dict[str, float]:
    """Names and numbers to log: a name with `/*`, such as `name/*`, becomes three, with mean, max and min for the star;
    `name^` becomes name with the maximum; any other name gets the mean. Statistics without values are omitted."""
    flat: dict[str, float] = {}
    for name, (total, count, low, high) in stats.items():
        if count == 0:
            continue
        if "/*" in name:
            numbers = (("mean", total / count), ("max", high), ("min", low))
            flat |= {name.replace("/*", f"/{word}"): number for word, number in numbers}
        elif name.endswith("^"):
            flat[name[:-1]] = high
        else:
            flat[name] = total / count
    return flat
