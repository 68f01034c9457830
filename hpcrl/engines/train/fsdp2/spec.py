"""PyTorch FSDP2, for any decoder of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from hpcrl.spec.fields import Section
from hpcrl.spec.kinds import TrainEngineSpec
from hpcrl.spec.problems import Problem


class FSDP2Config(Section):
    """How FSDP2 runs the model."""

    packing: Literal["auto", "require", "off"] = "auto"
    """Pack several sequences into a row; auto: if a probe at load succeeds, and not for rope_type dynamic and longrope;
    require: stop if it fails."""
    attention: Literal["auto", "flash", "sdpa"] = "auto"
    """Attention over packed sequences; flash: a kernel for sequences of different lengths, of flash-attn where it is
    installed, else torch's own, on GPUs in bfloat16; sdpa: torch's scaled_dot_product_attention over blocks of
    sequences of similar length; auto: flash where such a kernel gives what sdpa does, tried at the model's sizes."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""


def is_whole(config: Any, num_ranks: int) -> bool:
    """Whether a single rank has plain parameters (FSDP2Engine.sharded is False)."""
    own = config.trainer.section(FSDP2Config)
    return num_ranks == 1 and config.model.dtype == config.trainer.param_dtype and not own.cpu_offload


def _check(config: Any) -> Iterator[Problem]:
    own, trainer = config.trainer.section(FSDP2Config), config.trainer
    fits = trainer.param_dtype != "float32" and own.packing != "off" and config.cluster.device != "cpu"
    if own.attention == "flash" and not fits:
        text = "flash needs GPUs, trainer.param_dtype=bfloat16 and packing; use auto"
        yield Problem(("trainer", "fsdp2", "attention"), f"trainer.fsdp2.attention: {text}")


SPEC = TrainEngineSpec(
    about="PyTorch FSDP2, for any decoder of transformers.",
    make="hpcrl.engines.train.fsdp2.engine:make",
    section=FSDP2Config,
    check=_check,
    resume_keys=("attention", "activation_checkpointing", "cpu_offload"),
    plan="hpcrl.engines.train.fsdp2.memory:PLAN",
    whole=is_whole,
    computes=frozenset({"entropy"}),
    deterministic=True,
    float32_head=True,
    router_replay=True,
)
