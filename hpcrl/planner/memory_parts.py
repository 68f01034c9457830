"""Parts of a rank's memory and their phases, and the batch size, shared by all roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from hpcrl.config import Config, RoleName
from hpcrl.models.shape import ModelShape, Parameter
from hpcrl.spec.problems import Path

Phase = Literal["train", "update", "reference", "teacher", "critic", "critic_update", "generate", "publish"]
"""In this order: forward and backward; gradient reduction and optimizer step; reference log-probs; what a teacher
gives; the critic's forward and backward; the critic's optimizer step; decoding; weight transfer."""
PHASES: tuple[Phase, ...] = get_args(Phase)
BYTES = {"float32": 4, "bfloat16": 2}

Change = tuple[Path, Any]
"""A configuration key, and the value to try for it."""
PlanRow = tuple[str, str]
"""A line of the plan: its label (empty on continuation lines) and its text."""


@dataclass(frozen=True)
class Part:
    """Bytes of one part on the fullest rank of its role."""

    role: RoleName
    name: str
    num_bytes: int
    during: tuple[Phase, ...] = PHASES
    on_host: bool = False
    """Whether the part is in host memory even if the model is on a GPU."""
    least: int | None = None
    """Minimum bytes if the engine can run with less memory; None if all bytes are needed."""


def split_size(parameter: Parameter, shape: ModelShape, tensor: int, experts: int) -> int:
    """Elements of a parameter on one rank if matrices are split over `tensor` ranks and experts over `experts` ranks.
    If there are fewer key and value heads than ranks, several ranks hold the same head."""
    match parameter.split:
        case "column" | "row" | "vocabulary":
            return -(-parameter.size // tensor)
        case "key":
            return parameter.size // min(tensor, shape.num_kv_heads)
        case "expert":
            return -(-parameter.size // experts)
        case "whole":
            return parameter.size


def samples_of_a_step(config: Config) -> int:
    """Sequences per step."""
    if (batch_size := config.pipeline_spec.batch_size) is not None:
        return batch_size(config) * (2 if config.row_kind == "pairs" else 1)
    return config.rollout.num_prompts * config.rollout.group_size


def samples_of_an_update(config: Config) -> int:
    """Sequences per optimizer step, at most."""
    if config.pairs_per_group:
        return 2 * config.pairs_per_group * config.rollout.num_prompts
    parts = config.algorithm.num_mini_batches if config.pipeline_spec.batch_size is None else 1
    return samples_of_a_step(config) // parts


def has_gpus(config: Config, roles: tuple[RoleName, ...]) -> bool:
    """Whether these ranks use GPUs, according to the configuration."""
    if config.cluster.device != "auto":
        return config.cluster.device == "cuda"
    components = config.cluster.components.values()
    own = [spec for spec in components if set(spec.roles) & set(roles)] or list(components)
    return any(spec.gpus_per_node for spec in own)
