"""Environments made of verifiers' classes; only tests marked `outside` import them."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset
from gem.envs.game_env.guess_the_number import GuessTheNumberEnv
from verifiers.envs.experimental.gym_env import GymEnv

CLEANED: list[str] = []


def data(*answers: str, question: str = "Go on.") -> Dataset:
    return Dataset.from_list([{"question": question, "answer": answer} for answer in answers])


def guessing() -> GymEnv:
    """A game of GEM in verifiers' adapter for games, which has its seeds as answers."""
    return GymEnv(env_cls=GuessTheNumberEnv, env_kwargs={"max_number": 5}, num_train_episodes=4, num_eval_episodes=2)


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: The one.
        second: The other.
    """
    return first + second


def says_answer(completion: Any, answer: str) -> float:
    return float(answer in completion[-1]["content"])


def adding() -> vf.ToolEnv:
    return vf.ToolEnv(dataset=data("5"), tools=[add], rubric=vf.Rubric([says_answer]), system_prompt="Use tools.")


class Rough(vf.MultiTurnEnv):
    """Does what the response says."""

    def __init__(self, function: Any = says_answer) -> None:
        super().__init__(dataset=data("yes"), rubric=vf.Rubric([function]), max_turns=9)

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        said = messages[-1]["content"]
        if said == "error":
            raise vf.ToolError("no such tool")
        if said == "raise":
            raise KeyError("no such move")
        if said == "picture":
            parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
            return [vf.UserMessage(content=parts)]
        if said == "end":
            state["final_env_response"] = [vf.UserMessage(content="It is over.")]
        return [vf.UserMessage(content=f"You said {said}.")]

    async def get_prompt_messages(self, state: Any) -> Any:
        messages = await super().get_prompt_messages(state)
        rewrites = state["trajectory"] and state["trajectory"][-1]["completion"][-1]["content"] == "rewrite"
        return messages[1:] if rewrites else messages

    @vf.cleanup
    async def note(self, state: Any) -> None:
        CLEANED.append(state["answer"])


def longest(states: list[Any]) -> list[float]:
    return [0.0] * len(states)


def comparing() -> Rough:
    return Rough(longest)


def fails(text: str = "") -> None:
    raise KeyError(text)
