"""What an environment is: the gymnasium interface over text. It imports neither torch.distributed nor engines."""

from __future__ import annotations

from typing import Any, Protocol


class Env(Protocol):
    """Observations and actions are text. `info["metrics"]` (name -> float) is logged under env/<tag>/.

    An environment that holds something (a process, a file) has close() too: called once, after its last step, which
    may come before the episode is over.
    """

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Start an episode, a function of the seed alone; returns (first observation, info)."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """(observation, reward of this turn, terminated, truncated, info)."""
