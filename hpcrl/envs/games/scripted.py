"""A scripted two-turn environment that asks for a second answer. For tests and examples."""

from __future__ import annotations

from typing import Any

from hpcrl.envs.spec import ScriptedOptions


class ScriptedEnv:
    """Turn 1 gets the feedback, turn 2 ends the episode; reward 1 if the last answer equals `answer`, else 0."""

    def __init__(self, options: ScriptedOptions, answer: Any = ""):
        self._answer, self._feedback, self._turn = str(answer).strip(), options.feedback, 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._turn = 0
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        if self._turn == 1:
            return self._feedback, 0.0, False, False, {}
        success = float(action.strip() == self._answer)
        return "", success, True, False, {"metrics": {"success": success}}
