"""The tool protocol: a function with a schema, which the model may call."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Result:
    """The result of a call.

    Args:
        error: Whether the tool has failed.
        success: Whether the episode has succeeded so far; None if the tool does not report it.
        ended: Whether the episode is over.
        images: Images that the model sees before the text, in a form that hpcrl.envs.environment allows.
    """

    text: str
    error: bool = False
    reward: float = 0.0
    success: bool | None = None
    ended: bool = False
    images: tuple[Any, ...] = ()


class Tool(Protocol):
    """A tool of one episode."""

    schema: dict[str, Any]
    """In OpenAI form: {"type": "function", "function": {"name", "description", "parameters"}}."""

    def begin(self, seed: int) -> None:
        """Start the episode of this seed."""

    def call(self, arguments: dict[str, Any], timeout_s: float) -> Result:
        """Answer a call whose arguments match the schema, within about timeout_s. The model is shown any exception."""


def schema(name: str, description: str, optional: Collection[str] = (), **parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI form; all parameters except `optional` are required."""
    required = [parameter for parameter in parameters if parameter not in optional]
    wanted = {"type": "object", "properties": parameters, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": wanted}}
