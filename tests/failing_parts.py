"""Parts of a check that fail, for test_gpu_check.py; in a module of their own, which imports little."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from tests.bench.gpu.common import Check, Row


def raises(check: Check) -> Iterator[Row]:
    yield Row("bad one", "before", 1.0)
    error = ValueError(f"facts are {dict(check.facts)}")
    error.add_note("a line that follows, such as a warning of Python's resource tracker")
    raise error


def aborts(check: Check) -> Iterator[Row]:
    yield Row("bad one", "before", 1.0)
    os.abort()


def hangs(check: Check) -> Iterator[Row]:
    time.sleep(600)
    yield Row("bad one", "after", 1.0)
