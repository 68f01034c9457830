"""A run's optional output (completions, pages, plot, summary). The run succeeds even if this output cannot be made."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def best_effort(what: str, make: Callable[[], T], instead: T) -> T:
    """The result of `make`; if it fails, log a warning that names `what` and return `instead`."""
    try:
        return make()
    except Exception as error:
        logger.warning("%s could not be made: %s: %s", what, type(error).__name__, error)
        return instead
