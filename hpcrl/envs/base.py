"""What an environment is: the gymnasium interface over text. It imports neither torch.distributed nor engines."""

from __future__ import annotations

from typing import Any, Protocol

Observation = str | list[dict[str, Any]]
"""Text, which becomes a user message, or messages in chat form: {"role": "tool", "content": "..."}. A message may refer
to images: {"role": "user", "content": "...", "images": ["file.png"]}."""


class Env(Protocol):
    """One episode. `info["metrics"]` (name -> float) is logged under env/<domain>/.

    It is made with env.<domain>.options as arguments, and of the columns of the prompt's row (answer, prompt, messages
    and those of the data) with those that its constructor names; with all of them where that takes **columns.

    An environment that holds something (a process, a file) has close() too: called once, after its last step, which
    may come before the episode is over.
    """

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Start an episode, a function of the row and the seed alone; returns (first observation, info).

        The observation is the first prompt: a text takes the place of the last message of the row's prompt, messages
        that of all of them; an empty one leaves the row's prompt as it is.
        """

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """(observation, reward of this turn, terminated, truncated, info)."""
