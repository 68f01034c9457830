"""Memory of a rank of the DeepSpeed engine: the state, which each ZeRO stage shards, and DeepSpeed's own buffers."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, Problem
from hpcrl.engines.train.deepspeed.spec import AT, BUCKET_NUMBERS, DeepSpeedConfig
from hpcrl.engines.train.deepspeed.traffic import step_traffic
from hpcrl.engines.train.router_keys import without_routers
from hpcrl.models.shape import CannotPlanError, ModelShape
from hpcrl.planner.activations import FP32, Tokens, unmeasured
from hpcrl.planner.adapters import merging_bytes, published, saved, trained, with_adapters
from hpcrl.planner.memory_parts import BYTES, PHASES, Change, Part, Phase, PlanRow, samples_of_an_update
from hpcrl.planner.moments import fullest, moments
from hpcrl.planner.traffic import Sent, StepWork
from hpcrl.planner.trainer import forward_parts
from hpcrl.spec.problems import engine_problem

LIVE_NUMBERS = 1_000_000_000
"""DeepSpeed's limit for gathered parameters (stage3_max_live_parameters, stage3_max_reuse_distance). A parameter that
is used again within this many numbers is not freed. AdamW also updates this many numbers at once (sub_group_size)."""
PERSISTENT_NUMBERS = 100_000
"""Parameters up to this size stay gathered (stage3_param_persistence_threshold)."""
OPTIMIZER_BYTES = 2 * FP32
"""Bytes of AdamW's two moments per number."""


def own(config: Config) -> DeepSpeedConfig:
    return config.trainer.section(DeepSpeedConfig)


def part_size(shape: ModelShape, stage: int, num_ranks: int) -> int:
    """Number of elements in a rank's shard of the state. ZeRO-3 splits each parameter. Other stages concatenate all
    matrices, and all vectors, and split each; every rank's shard has an even number of elements."""
    if stage == 3:
        return sum(-(-parameter.size // num_ranks) for parameter in shape.parameters)
    groups = [sum(p.size for p in shape.parameters if (len(p.shape) >= 2) == matrices) for matrices in (True, False)]
    return sum(2 * -(-group // (2 * num_ranks)) for group in groups)


def weight_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Weights, optimizer state and gradients, by stage and offload setting."""
    zero, compute = own(config), BYTES[config.trainer.param_dtype]
    learnt, whole = trained(config, shape), with_adapters(config, shape)
    part, on_host = part_size(learnt, zero.zero_stage, num_ranks), zero.offload_optimizer != "none"
    counters = len({len(parameter.shape) >= 2 for parameter in learnt.parameters})
    moment_bytes = 0 if zero.offload_optimizer == "nvme" else OPTIMIZER_BYTES  # weights start in host memory
    step: tuple[Phase, ...] = ("train", "update")
    parts = [
        Part("trainer", "fp32 weights", part * FP32, on_host=on_host),
        Part("trainer", "optimizer", part * moment_bytes + counters * FP32, on_host=on_host),
    ]
    if on_host:
        parts.append(Part("trainer", "fp32 gradients", part * FP32, on_host=True))
    if zero.zero_stage == 3:
        offloaded = zero.offload_parameters != "none"
        parts += [
            Part("trainer", "weights", part_size(whole, 3, num_ranks) * compute, on_host=offloaded),
            Part("trainer", "gathered weights", _persistent(whole) * compute),
            Part("trainer", "gathered weights", _gathered(whole) * compute, step),
            Part("trainer", "gradients", part * FP32, on_host=on_host),
        ]
    else:
        kept = part * FP32 if zero.zero_stage == 2 else learnt.num_parameters * (compute + FP32 * (compute < FP32))
        frozen = whole.num_parameters - learnt.num_parameters
        parts += [
            Part("trainer", "weights", (part * num_ranks + frozen) * compute),
            Part("trainer", "gradients", kept, step),
        ]
    if not on_host:  # the gradients as one tensor for AdamW
        at_once = min(part, LIVE_NUMBERS) if zero.zero_stage == 3 else part
        parts.append(Part("trainer", "gradients of the step", at_once * FP32, ("update",)))
    return parts


def disk_bytes(config: Config, shape: ModelShape, num_ranks: int) -> int:
    """Bytes that a rank stores in trainer.deepspeed.nvme_path."""
    zero, size = own(config), 0
    if zero.offload_optimizer == "nvme":
        size += part_size(trained(config, shape), zero.zero_stage, num_ranks) * (FP32 + OPTIMIZER_BYTES)
    if zero.offload_parameters == "nvme":
        size += part_size(with_adapters(config, shape), 3, num_ranks) * BYTES[config.trainer.param_dtype]
    return size


def _persistent(shape: ModelShape) -> int:
    return sum(parameter.size for parameter in shape.parameters if parameter.size <= PERSISTENT_NUMBERS)


def _gathered(shape: ModelShape) -> int:
    """Size of the gathered parameters that are freed after a step."""
    layer = max(sum(parameter.size for parameter in shape.of_layer(i)) for i in range(shape.num_layers))
    return min(shape.num_parameters - _persistent(shape), LIVE_NUMBERS + layer)


def bucket_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of the buffers in which gradients are reduced: on GPUs two, because communication overlaps."""
    zero = own(config).options.get("zero_optimization", {})
    size = int(zero.get("reduce_bucket_size", min(BUCKET_NUMBERS, trained(config, shape).num_parameters)))
    return size * FP32 * (1 if config.cluster.device == "cpu" else 2)


def trainer_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Memory parts of any trainer rank."""
    trainer, zero = config.trainer, own(config)
    tokens = Tokens.of(config, -(-samples_of_an_update(config) // num_ranks), shape.tower)
    compute = BYTES[trainer.param_dtype]
    largest = PLAN.largest_tensor(trained(config, shape))
    converted = compute + FP32 * (compute < FP32 and zero.zero_stage == 3)  # ZeRO-3 converts gradients to reduce them
    snapshot = PLAN.checkpoint_bytes(config, shape) // num_ranks + largest * (FP32 + OPTIMIZER_BYTES)
    step: tuple[Phase, ...] = ("train", "update")
    colocated = RoleLayout.from_config(config).generates_on_trainers
    wire = config.generator.dtype if colocated else config.model.dtype  # sent weights are converted when packed
    gathered = 2 * PLAN.largest_tensor(published(config, shape, first=True)) * BYTES[wire]
    return [
        *weight_parts(config, shape, num_ranks),
        Part("trainer", "reduction", bucket_bytes(config, shape), PHASES if zero.zero_stage == 3 else step),
        Part("trainer", "largest gradient", largest * converted, ("train",)),
        *fullest(moments(config, shape, tokens, zero.activation_checkpointing)),
        Part("trainer", "snapshot", snapshot * bool(config.save_every), on_host=True),  # from the first save on
        Part("trainer", "gathered weights", gathered, ("publish",)),
        Part("trainer", "merged matrix", merging_bytes(config, shape), ("publish",)),
    ]


class ZeroPlan:
    """The TrainPlan (hpcrl.planner.trainer) of DeepSpeed."""

    def check(self, config: Config, layout: RoleLayout, shape: ModelShape) -> list[Problem]:
        return list(without_routers(own(config), shape, functools.partial(engine_problem, AT)))

    def trainer_parts(self, config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
        return trainer_parts(config, shape, num_ranks)

    def reference_parts(self, config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
        zero, compute = own(config), BYTES[config.trainer.param_dtype]
        if zero.zero_stage < 3:
            return forward_parts(config, shape, num_ranks, shape.num_parameters * compute, 0, on_host=False)
        weights = part_size(shape, 3, num_ranks) * compute
        gathered = (_gathered(shape) + _persistent(shape)) * compute
        return forward_parts(config, shape, num_ranks, weights, gathered, zero.offload_parameters != "none")

    def checkpoint_bytes(self, config: Config, shape: ModelShape) -> int:
        learnt = trained(config, shape)
        kept = (saved(config, shape).num_parameters - learnt.num_parameters) * BYTES[config.trainer.param_dtype]
        return learnt.num_parameters * (FP32 + OPTIMIZER_BYTES) + FP32 * len(learnt.parameters) + kept

    def largest_tensor(self, shape: ModelShape) -> int:
        return max(parameter.size for parameter in shape.parameters)  # a layer's experts are one tensor

    def num_senders(self, config: Config, num_ranks: int) -> int:
        return num_ranks

    def step_traffic(self, config: Config, shape: ModelShape, num_ranks: int, work: StepWork) -> list[Sent]:
        zero = own(config)
        if zero.zero_stage == 3 and zero.activation_checkpointing:
            raise CannotPlanError("with activation checkpointing, the number of ZeRO-3 gathers per layer is not known")
        persistent = _persistent(with_adapters(config, shape))
        return list(step_traffic(config, shape, num_ranks, work, zero.zero_stage, persistent))

    def changes(self, config: Config, shape: ModelShape) -> dict[str, list[Change]]:
        at = ("trainer", "deepspeed")
        offload: list[Change] = [((*at, "zero_stage"), 3), ((*at, "offload_optimizer"), "cpu")]
        return {
            "recompute": [((*at, "activation_checkpointing"), True)],
            "ranks": [*offload, ((*at, "offload_parameters"), "cpu")],
        }

    def rows(self, config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[PlanRow]:
        if on_disk := disk_bytes(config, shape, len(layout.ranks["trainer"])):
            yield "on disk", f"{on_disk / 2**30:.1f} GiB per trainer rank in {own(config).nvme_path} on its node"
        yield from unmeasured(config, shape)


PLAN = ZeroPlan()
