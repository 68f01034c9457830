"""Run a function on all ranks of an engine; if it fails on one, raise on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def agreed(work: Callable[[], T]) -> T:
    """Return work()'s result. A ValueError on any rank is raised on every rank. Collective over the default group."""
    result, message = None, None
    try:
        result = work()
    except ValueError as error:
        message = str(error)
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    if failed := [m for m in messages if m is not None]:
        raise ValueError(failed[0])
    return result  # type: ignore[return-value]
