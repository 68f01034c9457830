"""Refuses calls of hpcrl in files that a run imports for a part: each process of the run would call again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

INSIDE = "HPCRL_CALLED_FROM_PYTHON"
"""Environment variable of all processes of a run that hpcrl.train has started, and set while hpcrl.plan checks one."""


def check_outside(call: str) -> None:
    """RuntimeError if a run, or the check of one, has imported the calling file."""
    if os.environ.get(INSIDE):
        raise RuntimeError(
            f"{call} is called by a file that a run of hpcrl imports for its reward or environment: the call belongs "
            'below if __name__ == "__main__":, or the reward or environment into a file of its own'
        )


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Within it, check_outside() refuses calls, in this process and in new ones."""
    os.environ[INSIDE] = "1"
    try:
        yield
    finally:
        del os.environ[INSIDE]
