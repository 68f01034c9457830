"""What a run shows beside its results: completions, pages of episodes, the plot, the summary. A failure of these costs
no run: what a run has trained is recorded first."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def best_effort(what: str, make: Callable[[], T], instead: T) -> T:
    """What `make` returns; if it fails, a line that names `what`, and `instead`."""
    try:
        return make()
    except Exception as error:
        logger.warning("%s could not be made: %s: %s", what, type(error).__name__, error)
        return instead
