"""Parts of a rank's memory, and when they are there: what the roles of a rank have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config import Config, RoleName
from hpcrl.planner.shapes import ModelShape, Parameter

Phase = Literal["train", "update", "reference", "generate", "publish"]
"""forward and backward; gradients reduced and optimizer step; log-probs of the reference; decoding; weights go over."""
PHASES: tuple[Phase, ...] = ("train", "update", "reference", "generate", "publish")
BYTES = {"float32": 4, "bfloat16": 2}


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


def largest_tensor(config: Config, shape: ModelShape) -> int:
    """Numbers of the largest tensor that goes from a trainer to a generator: transformers has all experts of a layer in
    one, Megatron each on its own."""
    fused = config.trainer.engine != "megatron"
    return max(p.size if fused or p.split != "expert" else p.size // p.shape[0] for p in shape.parameters)


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
