"""Megatron-Core: a model that is split over ranks by tensors, layers, sequences and experts."""

from __future__ import annotations

from typing import Literal

from hpcrl.spec.fields import Positive, Section
from hpcrl.spec.kinds import TrainEngineSpec


class MegatronConfig(Section):
    """How Megatron-Core splits the model over the trainer's ranks; the rest of them is data parallel."""

    tensor_parallel: Positive = 1
    """Ranks that share each matrix."""
    sequence_parallel: bool = False
    """Share activations outside the matrices over the same ranks."""
    pipeline_parallel: Positive = 1
    """Stages of consecutive layers."""
    virtual_pipeline: Positive = 1
    """Chunks of layers that each stage holds in turn."""
    context_parallel: Positive = 1
    """Ranks that share each sequence."""
    expert_parallel: Positive = 1
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel: Positive = 1
    """Ranks that share each expert's matrices."""
    account_for_embedding_in_pipeline_split: bool = False
    """The embedding counts as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """The vocabulary projection counts as a layer of the last stage."""
    recompute: Literal["none", "selective", "full"] = "selective"
    """Activations computed again in the backward pass: none, attention's, or all but each layer's input."""
    distributed_optimizer: bool = True
    """Share the optimizer's state over the data parallel ranks."""


SPEC = TrainEngineSpec(
    about="Megatron-Core: a model that is split by tensors, layers, sequences and experts.",
    section=MegatronConfig,
    plan="hpcrl.engines.train.megatron.memory:PLAN",
    needs={"megatron.core": "megatron"},
    resume_keys=tuple(MegatronConfig.model_fields),
)
