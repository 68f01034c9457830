"""Megatron-Core: tensor, pipeline, context and expert parallelism."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal

from hpcrl.engines.train.megatron.unsupported import lacking
from hpcrl.engines.train.router_keys import ROUTER_KEYS, frozen_routers
from hpcrl.spec.division import Division, DivisionError
from hpcrl.spec.fields import NonNegative, Positive, Section
from hpcrl.spec.kinds import TrainEngineSpec
from hpcrl.spec.problems import Problem, engine_problem

AT = ("trainer", "megatron")
problem = functools.partial(engine_problem, AT)

ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


class MegatronConfig(Section):
    """How Megatron-Core splits the model over the trainer's ranks; the remaining factor is data parallel."""

    tensor_parallel: Positive = 1
    """Ranks over which each matrix is split."""
    sequence_parallel: bool = False
    """Split activations outside the matrices over the tensor parallel ranks."""
    pipeline_parallel: Positive = 1
    """Stages of consecutive layers."""
    virtual_pipeline: Positive = 1
    """Chunks of layers per stage (interleaved schedule)."""
    context_parallel: Positive = 1
    """Ranks over which each sequence is split."""
    expert_parallel: Positive = 1
    """Ranks over which the experts of a layer are distributed."""
    expert_tensor_parallel: Positive = 1
    """Ranks over which each expert's matrices are split."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the vocabulary projection as a layer of the last stage."""
    num_layers_in_first_pipeline_stage: Positive | None = None
    """Layers of the first stage; null: as many as each middle stage. Not with account_for_*."""
    num_layers_in_last_pipeline_stage: Positive | None = None
    """Layers of the last stage; null: as many as the stages between. Not with account_for_*."""
    recompute: Literal["none", "selective", "full"] = "selective"
    """Activations recomputed in the backward pass: none, those inside attention, or all except each layer's input. On
    GPUs fused attention stores no inner activations, so selective equals none."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    overlap_gradients: bool = False
    """Sum gradients over data-parallel ranks during the backward pass."""
    overlap_parameters: bool = False
    """Gather the parameters updated by the distributed optimizer during the next forward pass; needs
    overlap_gradients."""
    aux_loss: NonNegative = 0.0
    """Mixture of experts: coefficient of the load-balancing loss of each sequence and layer, averaged over sequences
    (arXiv 2101.03961; per sequence: arXiv 2412.19437)."""
    z_loss: NonNegative = 0.0
    """Mixture of experts: coefficient of the mean squared log-sum-exp of router logits (arXiv 2202.08906), per sequence
    and layer, averaged over sequences."""

    expert_bias_rate: NonNegative = 0.0
    """Mixture of experts whose routers have a bias per expert (DeepSeek-V3, GLM-4.5): change of a bias in a step,
    towards an even load (arXiv 2408.15664; .001 in DeepSeek-V3's own training). 0: biases do not change."""

    @property
    def layers_of_ends(self) -> dict[str, int]:
        """The keys that set the first and the last stage's layers, if set."""
        return {key: count for key in ENDS if (count := getattr(self, key)) is not None}

    @property
    def ranks_of_a_copy(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def ranks_of_all_experts(self) -> int:
        """Ranks that share one copy of the experts."""
        return self.expert_parallel * self.expert_tensor_parallel * self.pipeline_parallel


def divide(config: Any, num_ranks: int) -> Division:
    """In Megatron-Core's rank order (parallel_state, "tp-cp-ep-dp-pp"): from the fastest-varying to the slowest:
    ranks that split matrices, ranks that split sequences, copies of the model, stages. The ranks of a stage publish
    its layers."""
    megatron: MegatronConfig = config.trainer.section(MegatronConfig)
    if problems := list(indivisible(megatron, num_ranks)):
        raise DivisionError(problems)
    copy, stages = megatron.ranks_of_a_copy, megatron.pipeline_parallel
    width, stage = copy // stages, num_ranks // stages
    groups = tuple(
        tuple(number * stage + first + rank for number in range(stages) for rank in range(width))
        for first in range(0, stage, width)
    )
    outputs = tuple(group[-width] for group in groups)
    return Division(groups, outputs, tuple(tuple(range(first, first + stage)) for first in range(0, num_ranks, stage)))


def indivisible(megatron: MegatronConfig, num_ranks: int) -> Iterator[Problem]:
    """Why the model cannot be split as configured over this many ranks."""
    tensor, pipeline, context = megatron.tensor_parallel, megatron.pipeline_parallel, megatron.context_parallel
    if num_ranks % (size := megatron.ranks_of_a_copy):
        text = (
            f"tensor {tensor} x pipeline {pipeline} x context {context} = {size} ranks hold the model, and the layout "
            f"gives {num_ranks}, which is not a multiple of it"
        )
        yield problem("tensor_parallel", text, "pipeline_parallel", "context_parallel")
    if num_ranks % (size := megatron.ranks_of_all_experts):
        text = (
            f"expert {megatron.expert_parallel} x expert tensor {megatron.expert_tensor_parallel} x pipeline "
            f"{pipeline} = {size} ranks hold all experts, and the layout gives {num_ranks}, "
            "which is not a multiple of it"
        )
        yield problem("expert_parallel", text, "expert_tensor_parallel", "pipeline_parallel")


def _check(config: Any) -> Iterator[Problem]:
    own = config.trainer.section(MegatronConfig)
    if own.overlap_parameters and not (own.overlap_gradients and own.distributed_optimizer):
        text = "true needs overlap_gradients=true and distributed_optimizer=true"
        yield problem("overlap_parameters", text, "overlap_gradients", "distributed_optimizer")
    yield from frozen_routers(config, own, problem)
    yield from _of_adapters(config)
    for key, count in own.layers_of_ends.items():
        if own.pipeline_parallel == 1:
            yield problem(
                key,
                f"{count} layers of one stage, but there is only one; set pipeline_parallel or unset this key",
                "pipeline_parallel",
            )
        elif counted := [other for other in COUNTED if getattr(own, other)]:
            yield problem(key, f"{count} cannot be combined with {counted[0]}=true; set only one of them", *counted)


def _of_adapters(config: Any) -> Iterator[Problem]:
    """Keys of trainer.lora that this engine does not support."""
    lora, at = config.lora, ("trainer", "lora")
    if lora is None:
        return
    if lora.dropout:
        text = (
            f"{lora.dropout:g}: the ranks of the megatron trainer split an adapter's inputs, and would draw different "
            "inputs to drop; use 0, or trainer.engine=fsdp2"
        )
        yield Problem((*at, "dropout"), f"trainer.lora.dropout: {text}", (("trainer", "engine"),))
    if "experts" in lora.parts:
        text = "the megatron trainer has no adapters of experts; leave experts out, or use trainer.engine=fsdp2"
        yield Problem((*at, "parts"), f"trainer.lora.parts: {text}", (("trainer", "engine"),))


SPEC = TrainEngineSpec(
    about="Megatron-Core: tensor, pipeline, context and expert parallelism.",
    section=MegatronConfig,
    check=_check,
    division=divide,
    make="hpcrl.engines.train.megatron.engine:make",
    unsupported=lacking,
    plan="hpcrl.engines.train.megatron.memory:PLAN",
    needs={"megatron.core": "megatron"},
    needs_on_gpu={
        "transformer_engine": "pip install --no-build-isolation 'transformer_engine[core_cu13,pytorch]>=2.9,<2.12' (it "
        "is compiled), or the image of env/apptainer/megatron.def"
    },
    tested_versions={"megatron.core": "0.16."},
    not_on_amd="its layers come from Transformer Engine, whose wheels are for CUDA",
    deterministic=True,
    float32_head=True,
    exchanges_state=True,
    exchanges_adapters=True,
    lora=True,
    freezes=True,
    router_replay=True,
    policy_keys=ROUTER_KEYS,
    resume_keys=tuple(key for key in MegatronConfig.model_fields if key not in ROUTER_KEYS),
    segments=True,
    computes=frozenset({"entropy", "divergence"}),
    teaches=frozenset({"sampled", "top_k", "full"}),
    make_critic="hpcrl.engines.train.megatron.critic:make",
)
