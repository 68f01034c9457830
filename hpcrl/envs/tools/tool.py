"""What a tool is: a function with a schema, which the model may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Result:
    """What a call led to. error: the tool has failed. success: whether the episode has succeeded so far; None: the tool
    does not say. ended: the episode is over."""

    text: str
    error: bool = False
    reward: float = 0.0
    success: bool | None = None
    ended: bool = False


class Tool(Protocol):
    """A tool of one episode."""

    schema: dict[str, Any]
    """In OpenAI form: {"type": "function", "function": {"name", "description", "parameters"}}."""

    def begin(self, seed: int) -> None:
        """Start the episode of this seed."""

    def call(self, arguments: dict[str, Any], timeout_s: float) -> Result:
        """Answer a call whose arguments fit the schema, within about timeout_s. Any exception is told to the model."""


def schema(name: str, description: str, **parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI form; all parameters are needed."""
    wanted = {"type": "object", "properties": parameters, "required": list(parameters), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": wanted}}
