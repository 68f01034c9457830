"""Tokens and log-probs of all iterations: one row per decode iteration, one column per slot.

A request's part is read when the request ends, so the decode loop does no work per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hpcrl.spec.trajectory import Field


@dataclass(slots=True)
class OutputSpan:
    """A request's location in the output buffer: the iteration of its first token and its slots over time."""

    start: int
    segments: list[tuple[int, int]]  # (slot, first iteration in this slot)
    output_so_far: Mapping[str, np.ndarray]  # OutputBuffer.content() from before it was preempted


class OutputBuffer:
    """Token ids, log-probs, behaviour log-probs, weight versions and optionally routes, from iteration `_base` on."""

    def __init__(self, num_slots: int, routes: Field | None = None):
        self._base = 0  # iteration of the first row
        self.end = 0  # the next iteration
        rows = 64
        self._columns = {
            "token_ids": np.zeros((rows, num_slots), dtype=np.int32),
            "gen_logprobs": np.zeros((rows, num_slots), dtype=np.float32),
            "gen_logprobs_behaviour": np.zeros((rows, num_slots), dtype=np.float32),
        }
        if routes is not None:
            shape = (rows, *routes.shape(num_slots))
            self._columns["routes"] = np.full(shape, routes.fill, dtype=routes.travels_as)
        self._versions = np.zeros(rows, dtype=np.int32)
        self.nothing: Mapping[str, np.ndarray] = {
            **{name: column[:0, 0] for name, column in self._columns.items()},
            "versions": self._versions[:0],
        }
        """The content of a request without tokens."""

    def write(
        self, version: int, ids: np.ndarray, logprobs: np.ndarray, behaviour: np.ndarray, *routes: np.ndarray
    ) -> None:
        """Add one iteration. Arrays are [R], for the first R slots; routes are [R, width], if they are recorded."""
        row = self.end - self._base
        if row == len(self._versions):
            self._columns = {name: np.concatenate((c, np.zeros_like(c))) for name, c in self._columns.items()}
            self._versions = np.concatenate((self._versions, np.zeros_like(self._versions)))
        for column, values in zip(self._columns.values(), (ids, logprobs, behaviour, *routes), strict=True):
            column[row, : len(values)] = values
        self._versions[row] = version
        self.end += 1

    def length(self, span: OutputSpan) -> int:
        """The number of the request's tokens so far."""
        return len(span.output_so_far["token_ids"]) + self.end - span.start

    def read(self, span: OutputSpan, name: str, last: int | None = None) -> np.ndarray:
        """A copy of the request's values in one column: all, or the `last` ones."""
        column, start, before = self._columns[name], span.start, span.output_so_far[name]
        if last is not None:
            start = max(start, self.end - last)
            before = before[max(0, len(before) - (last - (self.end - start))) :]
        firsts = [max(first, start) - self._base for _, first in span.segments] + [self.end - self._base]
        parts = [column[firsts[i] : firsts[i + 1], slot] for i, (slot, _) in enumerate(span.segments)]
        return np.concatenate([before, *parts])

    def content(self, span: OutputSpan) -> dict[str, np.ndarray]:
        """All of the request's values by column, and each token's weight version as `versions`."""
        versions = self._versions[span.start - self._base : self.end - self._base]
        columns = {name: self.read(span, name) for name in self._columns}
        return columns | {"versions": np.concatenate([span.output_so_far["versions"], versions])}

    def forget(self, before: int) -> None:
        """Drop the iterations before this one, once they occupy most of the buffer."""
        drop, used = before - self._base, self.end - self._base
        if drop * 2 < len(self._versions):
            return
        for column in (*self._columns.values(), self._versions):
            column[: used - drop] = column[drop:used]
        self._base = before
