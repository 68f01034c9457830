"""Parts of a rank's memory, and when they are there: what the roles of a rank have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config import RoleName
from hpcrl.planner.shapes import ModelShape, Parameter
from hpcrl.spec.problems import Path

Phase = Literal["train", "update", "reference", "generate", "publish"]
"""forward and backward; gradients reduced and optimizer step; log-probs of the reference; decoding; weights go over."""
PHASES: tuple[Phase, ...] = ("train", "update", "reference", "generate", "publish")
BYTES = {"float32": 4, "bfloat16": 2}

Change = tuple[Path, Any]
"""A key and the value to try."""
Row = tuple[str, str]
"""A line of the plan: its name, empty where it goes on, and its text."""


@dataclass(frozen=True)
class Part:
    """Bytes of one kind on the fullest rank of its role."""

    role: RoleName
    name: str
    num_bytes: int
    during: tuple[Phase, ...] = PHASES
    on_host: bool = False
    """In host memory although the model is on a GPU."""
    least: int | None = None
    """Bytes without which nothing runs, where the engine makes do with less; None: with all of them."""


def split_size(parameter: Parameter, shape: ModelShape, tensor: int, experts: int) -> int:
    """Numbers of a parameter on one rank where `tensor` ranks share matrices and `experts` ranks share experts.

    Key and value heads are repeated where there are fewer of them than ranks.
    """
    match parameter.split:
        case "column" | "row" | "vocabulary":
            return -(-parameter.size // tensor)
        case "key":
            return parameter.size // min(tensor, shape.num_kv_heads)
        case "expert":
            return -(-parameter.size // experts)
        case "whole":
            return parameter.size
