"""What a run shows beside its results: completions, pages of episodes, the plot, the summary. A failure of these costs
no run: what a run has trained is recorded first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def decorate(what: str, make: Callable[[], T], instead: T) -> T:
    """What `make` returns; if it fails, a line that names `what`, and `instead`."""
    try:
        return make()
    except Exception as error:
        print(f"hpcrl: {what} could not be made: {type(error).__name__}: {error}", flush=True)
        return instead
