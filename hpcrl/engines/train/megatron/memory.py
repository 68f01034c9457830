"""Memory of a rank of a Megatron-Core trainer: weights, fp32 gradients, and its share of the optimizer state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, Problem
from hpcrl.engines.train.megatron.activations import megatron_activations
from hpcrl.engines.train.megatron.parallel import (
    Degrees,
    StageLayers,
    check_split,
    own,
    padded_vocabulary,
    split_layers,
)
from hpcrl.engines.train.megatron.spec import MegatronConfig
from hpcrl.engines.train.megatron.traffic import stage_traffic
from hpcrl.models.delta import split_by_heads
from hpcrl.models.shape import CannotPlanError, ModelShape, Parameter
from hpcrl.planner.activations import FP32, Tokens, logits_bytes
from hpcrl.planner.adapters import adapters, saved, trained
from hpcrl.planner.memory_parts import BYTES, Change, Part, PlanRow, has_gpus, samples_of_an_update, split_size
from hpcrl.planner.taught_memory import divergence_bytes
from hpcrl.planner.traffic import Sent, StepWork, total_bytes
from hpcrl.planner.trainer import forward_parts
from hpcrl.spec.lora import B, adapted

VALUE_HEAD = "score."
LAST = ("lm_head.weight", "model.norm.weight", "model.language_model.norm.weight", VALUE_HEAD)
"""Names of the last stage's parameters outside the layers."""


def _stages(shape: ModelShape, megatron: MegatronConfig) -> list[StageLayers]:
    stages = split_layers(shape.num_layers, megatron)
    assert stages is not None, "call check_split first"
    return stages


def stage_parameters(shape: ModelShape, megatron: MegatronConfig) -> list[list[Parameter]]:
    """The parameters that each stage publishes. The first stage has the embedding; the last has the final norm and the
    head."""
    stages = _stages(shape, megatron)
    stage_of = {layer: stage for stage, chunks in enumerate(stages) for chunk in chunks for layer in chunk}
    found: list[list[Parameter]] = [[] for _ in stages]
    for parameter in shape.parameters:
        if parameter.layer is not None:
            stage = stage_of[parameter.layer]
        else:
            stage = -1 if parameter.name.startswith(LAST) else 0
        found[stage].append(parameter)
    return found


def rank_numbers(shape: ModelShape, megatron: MegatronConfig) -> list[tuple[int, int]]:
    """(elements outside experts, elements in experts) on a rank of each stage. A tied head is a second embedding."""
    shape = split_by_heads(shape)
    stages = stage_parameters(shape, megatron)
    is_critic = any(parameter.name.startswith(VALUE_HEAD) for parameter in shape.parameters)
    if shape.tied and not is_critic and len(stages) > 1:
        stages[-1] += [parameter for parameter in shape.parameters if parameter.split == "vocabulary"]
    padding = padded_vocabulary(shape.vocab_size, megatron) - shape.vocab_size
    experts = megatron.expert_parallel * megatron.expert_tensor_parallel
    found = []
    for parameters in stages:
        counts = [0, 0]
        for parameter in parameters:
            size = split_size(parameter, shape, megatron.tensor_parallel, experts)
            if parameter.split == "vocabulary":
                size += -(-padding * shape.hidden_size // megatron.tensor_parallel)
            counts[parameter.split == "expert"] += size
        found.append((counts[0], counts[1]))
    return found


def micro_batches_in_flight(megatron: MegatronConfig, stage: int, num_micro_batches: int) -> int:
    """Number of forward passes of one chunk whose activations a stage holds at once (schedule 1F1B; the interleaved
    schedule is from arXiv 2104.04473)."""
    behind, chunks = megatron.pipeline_parallel - stage, megatron.virtual_pipeline
    if chunks > 1:
        behind = 2 * (behind - 1) + (chunks - 1) * megatron.pipeline_parallel + 1
    return min(behind, chunks * num_micro_batches)


def num_micro_batches(config: Config, num_ranks: int) -> int:
    """Number of micro-batches in an optimizer step if every sequence has the maximum length. Chunks process them in
    groups of pipeline_parallel; empty micro-batches fill the last group."""
    megatron = own(config)
    samples = -(-samples_of_an_update(config) // Degrees.of(megatron, num_ranks).data)
    tokens = samples * config.max_row_tokens
    count = -(-tokens // config.trainer.max_tokens_per_micro_batch)
    group = megatron.pipeline_parallel if megatron.virtual_pipeline > 1 else 1
    return -(-count // group) * group


def trained_on_ranks(config: Config, shape: ModelShape) -> ModelShape:
    """The shape with only the trained parameters. The matrices of adapters are split like their layers: B by rows, or A
    by columns. With more ranks than key heads, every rank has the B of its layers, and here all B are counted so."""
    if config.lora is None:
        return trained(config, shape)
    split_of = split_by_heads(shape).splits
    by_rows: tuple[str, ...] = () if shape.num_kv_heads % own(config).tensor_parallel else ("column", "key")

    def part(parameter: Parameter) -> Parameter:
        split = split_of[adapted(parameter.name)]
        if split not in (by_rows if parameter.name.endswith(B) else ("row",)):
            return parameter
        return dataclasses.replace(parameter, split="column")

    return dataclasses.replace(shape, parameters=tuple(map(part, adapters(config.lora, shape))))


def stage_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[list[Part]]:
    """Memory parts of a rank of each stage. The sizes must fit (check_split)."""
    numbers, learnt = (rank_numbers(each, own(config)) for each in (shape, trained_on_ranks(config, shape)))
    added = [sum(counts) * (config.lora is not None) for counts in learnt]  # adapters are beside the model
    held = [sum(counts) + more for counts, more in zip(numbers, added, strict=True)]
    pairs = zip(held, learnt, strict=True)
    return [_stage_parts(config, shape, num_ranks, stage, *each) for stage, each in enumerate(pairs)]


def _stage_parts(
    config: Config, shape: ModelShape, num_ranks: int, stage: int, held: int, learnt: tuple[int, int]
) -> list[Part]:
    """Parts of a rank with this many numbers, and trained ones outside and in experts."""
    dense, experts = learnt
    trainer, megatron = config.trainer, own(config)
    degrees, compute = Degrees.of(megatron, num_ranks), BYTES[trainer.param_dtype]
    tokens = Tokens.of(config, -(-samples_of_an_update(config) // degrees.data))
    per_number = 2 * FP32 + FP32 * (compute < FP32)  # two moments; a master copy of weights that are not fp32
    shares = (degrees.optimizer, degrees.expert_data) if megatron.distributed_optimizer else (1, 1)
    optimizer = per_number * (-(-dense // shares[0]) + -(-experts // shares[1]))
    chunks = _stages(shape, megatron)[stage]
    kept = [megatron_activations(shape, megatron, tokens, list(chunk), compute) for chunk in chunks]
    in_flight = micro_batches_in_flight(megatron, stage, num_micro_batches(config, num_ranks))
    activations = in_flight * max(chunk for chunk, _ in kept) + max(layer for _, layer in kept)
    logits = 0
    if stage == megatron.pipeline_parallel - 1:
        part = dataclasses.replace(shape, vocab_size=-(-shape.vocab_size // megatron.tensor_parallel))
        sizes = (part, tokens, trainer.logits_chunk_tokens, compute, bool(trainer.head_dtype))
        logits = logits_bytes(*sizes, gpu=has_gpus(config, ("trainer",)))
        logits += divergence_bytes(config, part, tokens, compute)[1]
    # Ranks that also generate and have all layers gather a layer's experts as one tensor.
    sent = shape if config.lora is None else trained(config, shape)
    largest = PLAN.largest_tensor(sent) if megatron.pipeline_parallel > 1 else max(p.size for p in sent.parameters)
    saved_numbers = held if config.lora is None else dense + experts
    return [
        Part("trainer", "weights", held * compute),
        Part("trainer", "gradients", (dense + experts) * FP32),
        Part("trainer", "optimizer", optimizer),
        Part("trainer", "activations", activations, ("train",)),
        Part("trainer", "logits", logits, ("train",)),
        Part("trainer", "snapshot", (saved_numbers * compute + optimizer) * bool(config.save_every), on_host=True),
        Part("trainer", "gathered weights", 2 * largest * compute, ("publish",)),
    ]


def megatron_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Memory parts of a rank of the fullest stage. The sizes must fit (check_split)."""
    return max(stage_parts(config, shape, num_ranks), key=lambda parts: sum(part.num_bytes for part in parts))


class MegatronPlan:
    """The TrainPlan (hpcrl.planner.trainer) of Megatron-Core."""

    def check(self, config: Config, layout: RoleLayout, shape: ModelShape) -> list[Problem]:
        return check_split(config, layout, shape)

    def trainer_parts(self, config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
        return megatron_parts(config, shape, num_ranks)

    def reference_parts(self, config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
        compute, megatron = BYTES[config.trainer.param_dtype], own(config)
        weights = max(sum(counts) for counts in rank_numbers(shape, megatron)) * compute
        return forward_parts(config, shape, num_ranks, weights, gathered=0, on_host=False)

    def checkpoint_bytes(self, config: Config, shape: ModelShape) -> int:
        compute = BYTES[config.trainer.param_dtype]  # weights, two moments, a master copy of weights that are not fp32
        of_optimizer = trained(config, shape).num_parameters * (2 * FP32 + FP32 * (compute < FP32))
        return saved(config, shape).num_parameters * compute + of_optimizer

    def largest_tensor(self, shape: ModelShape) -> int:
        return max(p.size if p.split != "expert" else p.size // p.shape[0] for p in shape.parameters)

    def num_senders(self, config: Config, num_ranks: int) -> int:
        return 1  # worst case: one rank may have all tensors of a step

    def step_traffic(self, config: Config, shape: ModelShape, num_ranks: int, work: StepWork) -> list[Sent]:
        megatron = own(config)
        if shape.latent is not None and megatron.tensor_parallel * megatron.context_parallel > 1:
            raise CannotPlanError(f"what ranks that share tokens exchange is not known for {shape.family}")
        stages, numbers = _stages(shape, megatron), rank_numbers(trained_on_ranks(config, shape), megatron)
        return max(stage_traffic(config, shape, num_ranks, work, stages, numbers), key=total_bytes)

    def changes(self, config: Config, shape: ModelShape) -> dict[str, list[Change]]:
        megatron, at = own(config), ("trainer", "megatron")
        cheap: list[Change] = [((*at, "sequence_parallel"), True)] if megatron.tensor_parallel > 1 else []
        costly: list[Change] = [
            ((*at, "distributed_optimizer"), True),
            ((*at, "context_parallel"), 2 * megatron.context_parallel),
        ]
        if shape.num_experts:
            costly.append(((*at, "expert_parallel"), 2 * megatron.expert_parallel))
        return {"time": cheap, "recompute": [((*at, "recompute"), "full")], "ranks": costly}

    def rows(self, config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[PlanRow]:
        megatron, ranks = own(config), len(layout.ranks["trainer"])
        degrees, stages = Degrees.of(megatron, ranks), split_layers(shape.num_layers, megatron)
        assert stages is not None, "call check_split first"
        yield (
            "split",
            f"tensor {megatron.tensor_parallel} x pipeline {megatron.pipeline_parallel} x context "
            f"{megatron.context_parallel} x data {degrees.data} = {ranks} ranks; experts {megatron.expert_parallel} x "
            f"expert tensor {megatron.expert_tensor_parallel} x expert data {degrees.expert_data}",
        )
        chunks = ["+".join(str(len(chunk)) for chunk in stage) for stage in stages]
        counts = " | ".join(f"{sum(map(len, stage))}" for stage in stages)
        yield (
            "",
            f"layers of each stage {counts}"
            + (f" ({'; '.join(dict.fromkeys(chunks))} by chunk)" if megatron.virtual_pipeline > 1 else ""),
        )
        samples = samples_of_an_update(config)
        yield (
            "",
            f"{samples} samples of an optimizer step / {degrees.data} = {samples / degrees.data:g} a data parallel "
            f"rank, at most {num_micro_batches(config, ranks)} micro-batches; vocabulary padded to "
            f"{padded_vocabulary(shape.vocab_size, megatron)}",
        )


PLAN = MegatronPlan()
