"""Places at which a test can kill the process: HPCRL_FAILPOINT=NAME, or NAME:K for the K-th time it is reached."""

from __future__ import annotations

import os
import signal

FAILPOINTS = ("shards_written", "sealed", "manifest_written", "renamed", "latest_replaced", "best_named", "pruned")

_hits: dict[str, int] = dict.fromkeys(FAILPOINTS, 0)


def failpoint(name: str) -> None:
    """Kill this process with SIGKILL if HPCRL_FAILPOINT names this place. ValueError if it names no known place, since
    a test with a misspelt name would pass without a kill."""
    assert name in _hits, f"failpoint {name} is not in FAILPOINTS"
    wanted = os.environ.get("HPCRL_FAILPOINT")
    if not wanted:
        return
    place, _, count = wanted.partition(":")
    if place not in _hits or not (count or "1").isdigit():
        raise ValueError(
            f"HPCRL_FAILPOINT={wanted} names no failpoint; use name or name:k with {', '.join(FAILPOINTS)}"
        )
    _hits[name] += 1
    if name == place and _hits[name] == int(count or "1"):
        os.kill(os.getpid(), signal.SIGKILL)
