"""The rows of a source `benchmark:NAME`: those of a published file, with the benchmark's prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from hpcrl.data.files import BadRow, Table
from hpcrl.spec.benchmarks import BENCHMARK, BENCHMARKS, BenchmarkOptions

QUESTION = "{question}"


class BenchmarkTable:
    """A table in the published form as rows of hpcrl, with the columns prompt and tag, the benchmark's name."""

    fixed_domain: str | None = None

    def __init__(self, name: str, options: BenchmarkOptions, table: Table):
        """ValueError if the template has no question."""
        self.name, self._table = name, table
        self._template = options.template if options.template is not None else BENCHMARKS[name].template
        if self._template.count(QUESTION) != 1:
            raise ValueError(f"{BENCHMARK}{name}: options.template must have {QUESTION} once: {self._template[:60]!r}")
        module, _, function = BENCHMARKS[name].rows.partition(":")
        self._read: Callable[[Mapping[str, Any]], dict[str, Any]] = getattr(import_module(module), function)
        self.padded = False  # the function keeps no null

    @cached_property
    def digest(self) -> str:
        facts = "\n".join([self._table.digest, self.name, self._template])
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> dict[str, Any]:
        try:
            row = self._read(self._table.row(index))
        except BadRow:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            raise BadRow(f"{self.where(index)}: not a row of {BENCHMARK}{self.name}: {error}") from error
        prompt = self._template.replace(QUESTION, row.pop("question"))
        return {"prompt": prompt, "tag": self.name, **{key: value for key, value in row.items() if value is not None}}

    def where(self, index: int) -> str:
        return self._table.where(index)

    def folder(self, index: int) -> Path:
        return self._table.folder(index)
