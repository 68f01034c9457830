"""Memory of a rank of the FSDP2 engine: its shard, and gathered parameters. A single rank that need not convert its
parameters has them unsharded. With tensor parallelism, a rank has its part of each split matrix."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from itertools import chain

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, Problem
from hpcrl.engines.train.fsdp2.gathered import GatheredState, stays_gathered
from hpcrl.engines.train.fsdp2.spec import BLOCK, MIN_NUMBERS, FSDP2Config, indivisible_heads, is_unsharded, problem
from hpcrl.engines.train.fsdp2.traffic import is_for_muon, receivers, step_traffic
from hpcrl.engines.train.router_keys import without_routers
from hpcrl.models.from_transformers import empty_model
from hpcrl.models.shape import CannotPlanError, ModelShape, ModelSource, Parameter
from hpcrl.planner.activations import FP32, Tokens, unmeasured
from hpcrl.planner.adapters import frozen, merging_bytes, published, saved, trained, with_adapters
from hpcrl.planner.memory_parts import (
    BYTES,
    PHASES,
    Change,
    Part,
    Phase,
    PlanRow,
    samples_of_a_step,
    samples_of_an_update,
)
from hpcrl.planner.moments import Beside, fullest, moments
from hpcrl.planner.mtp_memory import mtp_moments, with_mtp
from hpcrl.planner.traffic import Sent, StepWork
from hpcrl.planner.trainer import forward_parts

LAYERS_GATHERED = 2
"""Gathered layers of a larger model in a forward pass: the computing layer and the buffer of the last all-gather."""
STEP_BYTES = 4
"""Bytes of AdamW's step counter per tensor."""


ShardsOf = Callable[[Parameter], int]
"""Number of ranks that share a parameter."""


def shard_size(shape: ModelShape, num_ranks: int | ShardsOf, rank: int = 0) -> int:
    """Numbers in a rank's shard: every parameter's rows are split into equal blocks; the last ranks get fewer."""
    of = num_ranks if callable(num_ranks) else lambda parameter: num_ranks
    return sum(_shard_rows(p, of(p), rank) * (p.size // p.shape[0]) for p in shape.parameters)


def _shard_rows(parameter: Parameter, num_ranks: int, rank: int) -> int:
    rows = parameter.shape[0]
    block = -(-rows // num_ranks)
    return max(0, min(block, rows - rank * block))


def optimizer_bytes(config: Config, shape: ModelShape, shards_of: ShardsOf = lambda parameter: 1) -> int:
    """Optimizer bytes for these parameters' shards: AdamW's two moments, in the weights' type, and its counters; for
    matrices of layers Muon's momentum, codes and scales of 8-bit moments, or Adafactor's vectors."""
    return sum(_state_bytes(config, parameter, shards_of(parameter)) for parameter in shape.parameters)


def _state_bytes(config: Config, parameter: Parameter, num_shards: int) -> int:
    rows, columns = _shard_rows(parameter, num_shards, 0), parameter.size // parameter.shape[0]
    moment = rows * columns * BYTES[config.model.dtype]
    if not _has_own_update(config, parameter):
        return 2 * moment + STEP_BYTES
    if config.trainer.optimizer == "adafactor":
        stacked = len(parameter.shape) == 3
        return (
            FP32 * (rows * (columns // parameter.shape[-1]) + parameter.shape[-1] * (rows if stacked else 1))
            + STEP_BYTES
        )
    return (
        moment
        if config.trainer.optimizer == "muon"
        else 2 * rows * _filled(columns) * (BLOCK + FP32) // BLOCK + STEP_BYTES
    )


def _filled(columns: int) -> int:
    """A row's length padded to whole blocks."""
    return -(-columns // BLOCK) * BLOCK


def _has_own_update(config: Config, parameter: Parameter) -> bool:
    """Whether the optimizer updates it as a matrix of a layer, and not with AdamW."""
    if not parameter.in_layers or len(parameter.shape) < 2 or config.trainer.optimizer == "adamw":
        return False
    if config.trainer.optimizer in ("muon", "adafactor"):
        return is_for_muon(parameter)
    return parameter.size >= MIN_NUMBERS and parameter.size // parameter.shape[0] >= BLOCK


def _update_of_a_matrix(config: Config, shape: ModelShape, shards_of: ShardsOf) -> Part:
    """Peak memory of updating one matrix, or stack of matrices. Muon: the whole matrix, and during Newton-Schulz
    iterations the matrix before and after one, their sum, and three products of its shorter side. 8-bit AdamW: padded
    shards of weights and gradients. Adafactor: fp32 squares of a shard's gradients, the update, and its squares."""
    master, compute = BYTES[config.model.dtype], BYTES[config.trainer.param_dtype]

    def of(parameter: Parameter) -> int:
        if config.trainer.optimizer == "muon":
            square = parameter.size // max(parameter.shape[-2:]) * min(parameter.shape[-2:])
            return parameter.size * master + 3 * (parameter.size + square) * compute
        columns = parameter.size // parameter.shape[0]
        if config.trainer.optimizer == "adafactor":
            copied = 3 + (master != FP32)
            return copied * _shard_rows(parameter, shards_of(parameter), 0) * columns * FP32
        filled = _shard_rows(parameter, shards_of(parameter), 0) * _filled(columns)
        return 2 * filled * master * (columns % BLOCK > 0)

    most = max((of(p) for p in shape.parameters if _has_own_update(config, p)), default=0)
    return Part("trainer", "update of a matrix", most, ("update",))


def _gathered_numbers(shape: ModelShape, all_at_once: bool) -> int:
    """Numbers of these parameters that a rank has unsharded in a forward pass."""
    if all_at_once:
        return shape.num_parameters
    layer, outside = shape.gathered_together
    return outside + LAYERS_GATHERED * layer


def _held_bytes(config: Config, shape: ModelShape, shards_of: ShardsOf) -> int:
    """Bytes of a rank's trained and frozen parameters."""
    learnt = shard_size(trained(config, shape), shards_of) * BYTES[config.model.dtype]
    return learnt + shard_size(frozen(config, shape), shards_of) * BYTES[config.base_dtype]


def fsdp2_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Parts of the first rank, which has the most rows."""
    own = config.trainer.section(FSDP2Config)
    unsharded = is_unsharded(config, num_ranks)
    tokens = _tokens(config, shape, samples_of_an_update(config), num_ranks)
    published_bytes = 0 if unsharded and not config.merges_adapters else _gathered_to_publish(config, shape)
    policy = shape_of_rank(own, shape)
    shape = with_mtp(config, policy)
    state = GatheredState.of(config, policy, shape, num_ranks)
    learnt, numbers = state.learnt, shard_size(state.learnt, state.shards_of)
    master, optimizer = BYTES[config.model.dtype], optimizer_bytes(config, learnt, state.shards_of)
    stored = shard_size(saved(config, shape), state.shards_of)
    given = (config, policy, tokens, own.activation_checkpointing)
    of_policy = list(moments(*given, _of_other_ranks(config, policy, tokens)))
    # In the head's backward pass, all activations exist.
    kept = next(each.parts["activations"] for each in of_policy if each.unit is None and each.at == "backward")
    found = chain(of_policy, mtp_moments(*given, kept))
    # Gradients of a gathered model are reduced after the last backward, others after each backward.
    reduced: tuple[Phase, ...] = ("train", "update") if state.by_layer else ("update",)
    return [
        Part("trainer", "weights", _held_bytes(config, shape, state.shards_of), PHASES, own.cpu_offload),
        Part("trainer", "optimizer", optimizer, PHASES, own.cpu_offload),
        Part("trainer", "gradients", numbers * master, reduced, own.cpu_offload),
        _update_of_a_matrix(config, learnt, state.shards_of),
        *fullest(found, state.parts_at),
        *state.reduction(numbers * master * (not own.cpu_offload)),
        Part("trainer", "snapshot", (stored * master + optimizer) * bool(config.save_every), on_host=True),
        Part("trainer", "gathered weights", published_bytes, ("publish",)),
        Part("trainer", "merged matrix", merging_bytes(config, shape, state.num_shards), ("publish",)),
    ]


def _gathered_to_publish(config: Config, shape: ModelShape) -> int:
    """Bytes of full weights on a rank that passes them to its own generator, in the generator's type: everything if it
    stays gathered, else a tensor and the next one. A rank that sends its weights gathers nothing."""
    if not RoleLayout.from_config(config).generates_on_trainers:
        return 0
    wire, compute = BYTES[config.generator.dtype], BYTES[config.trainer.param_dtype]
    part = shape_of_rank(config.trainer.section(FSDP2Config), shape)
    at_once = config.lora is None and wire == compute and stays_gathered(part, compute, part.num_parameters)
    return (
        part.num_parameters * compute * at_once + 2 * PLAN.largest_tensor(published(config, shape, first=True)) * wire
    )


@functools.lru_cache(maxsize=8)
def _of_mixers(source: ModelSource) -> frozenset[str]:
    """Parameters of recurrent mixers and of attention that runs row by row, which tensor-parallel ranks hold whole."""
    from hpcrl.engines.train.fsdp2.row_mixers import mixers_of

    model = empty_model(source)
    inside = {id(parameter) for mixer in mixers_of(model).values() for parameter in mixer.parameters()}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in inside)


def shape_of_rank(own: FSDP2Config, shape: ModelShape) -> ModelShape:
    """The model with one tensor or expert parallel rank's parameters."""
    if own.expert_parallel > 1:
        return dataclasses.replace(shape, parameters=tuple(_of_experts(own, p) for p in shape.parameters))
    if own.tensor_parallel == 1:
        return shape
    whole = frozenset() if shape.source is None else _of_mixers(shape.source)

    def part(parameter: Parameter) -> Parameter:
        dim = {"column": 0, "key": 0, "expert": 0, "row": 1}.get(parameter.split)
        if dim is None or parameter.name in whole:
            return parameter
        sizes = list(parameter.shape)
        sizes[dim] //= own.tensor_parallel
        return dataclasses.replace(parameter, shape=tuple(sizes))

    return dataclasses.replace(shape, parameters=tuple(map(part, shape.parameters)))


def _of_experts(own: FSDP2Config, parameter: Parameter) -> Parameter:
    if parameter.split != "expert":
        return parameter
    num_experts, *sizes = parameter.shape
    return dataclasses.replace(parameter, shape=(num_experts // own.expert_parallel, *sizes))


def _tokens(config: Config, shape: ModelShape, num_samples: int, num_ranks: int) -> Tokens:
    """A rank's share of the tokens of its rows' largest micro-batch."""
    width = config.trainer.section(FSDP2Config).ranks_of_a_row
    return Tokens.of(config, -(-num_samples * width // num_ranks), shape.tower).shared(width)


def _of_other_ranks(config: Config, shape: ModelShape, tokens: Tokens) -> Beside:
    own, compute = config.trainer.section(FSDP2Config), BYTES[config.trainer.param_dtype]
    outside = of_other_ranks(own, shape, tokens, compute, 0)
    layer = of_other_ranks(own, shape, tokens, compute, 1) - outside
    return Beside(layer, outside + _exchanged_bytes(own, shape, tokens, compute))


def _exchanged_bytes(own: FSDP2Config, shape: ModelShape, tokens: Tokens, num_bytes: int) -> int:
    """Bytes of the exchange with experts of other ranks in one layer, if tokens choose experts evenly: states sent and
    received, their sums, and the sums that return."""
    if own.expert_parallel == 1:
        return 0
    return 4 * tokens.total * receivers(own, shape) * shape.hidden_size * num_bytes


def of_other_ranks(own: FSDP2Config, shape: ModelShape, tokens: Tokens, num_bytes: int, num_layers: int) -> int:
    """Bytes kept of other tensor parallel ranks' tokens: cosines and sines, and in these layers the inputs of split
    matrices."""
    return (own.tensor_parallel - 1) * tokens.total * 2 * (shape.head_dim + num_layers * shape.hidden_size) * num_bytes


@functools.lru_cache(maxsize=8)
def _obstacle(source: ModelSource) -> str:
    from hpcrl.engines.train.fsdp2.expert_parallel import obstacle

    return obstacle(empty_model(source))


def _indistributable(own: FSDP2Config, shape: ModelShape) -> Iterator[Problem]:
    """Why the experts of a layer cannot be distributed."""
    if own.expert_parallel == 1:
        return
    if not shape.num_experts:
        yield problem("expert_parallel", f"{own.expert_parallel}, but {shape.family} has no experts; use 1")
    elif shape.num_experts % own.expert_parallel:
        text = f"{own.expert_parallel} does not divide the {shape.num_experts} experts of a layer"
        yield problem("expert_parallel", text)
    elif shape.source is not None and (why := _obstacle(shape.source)):
        yield problem("expert_parallel", f"{own.expert_parallel}, but {shape.family}: {why}; use 1")


def _indivisible(own: FSDP2Config, shape: ModelShape) -> Iterator[Problem]:
    """Why the model cannot be split."""
    tensor = own.tensor_parallel
    if shape.attends:
        yield from indivisible_heads(own, shape.num_heads, shape.num_kv_heads)
    elif tensor > 1:
        text = f"{tensor}, but the layers of {shape.family} are recurrent and stay whole; use context_parallel"
        yield problem("tensor_parallel", text, "context_parallel")
        return
    if len(shape.expert_layers) < shape.num_layers and shape.intermediate_size % tensor:
        yield problem("tensor_parallel", f"{tensor} does not divide intermediate_size, {shape.intermediate_size}")
    if shape.num_experts % tensor:
        yield problem("tensor_parallel", f"{tensor} does not divide the {shape.num_experts} experts of a layer")


class FSDP2Plan:
    """The TrainPlan (hpcrl.planner.trainer) of FSDP2."""

    def check(self, config: Config, layout: RoleLayout, shape: ModelShape) -> list[Problem]:
        own = config.trainer.section(FSDP2Config)
        return [*_indivisible(own, shape), *_indistributable(own, shape), *without_routers(own, shape, problem)]

    def trainer_parts(self, config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
        return fsdp2_parts(config, shape, num_ranks)

    def reference_parts(self, config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
        own, compute = config.trainer.section(FSDP2Config), BYTES[config.trainer.param_dtype]
        shape = shape_of_rank(own, shape)
        shards_of = GatheredState.of(config, shape, shape, num_ranks).shards_of
        weights = shard_size(shape, shards_of) * BYTES[config.model.dtype]
        gathered = _gathered_numbers(shape, stays_gathered(shape, compute, 0)) * compute
        gathered *= not is_unsharded(config, num_ranks)
        parts = forward_parts(config, shape, num_ranks, weights, gathered, own.cpu_offload, own.ranks_of_a_row)
        if own.expert_parallel > 1:
            exchanged = _exchanged_bytes(
                own, shape, _tokens(config, shape, samples_of_a_step(config), num_ranks), compute
            )
            parts.append(Part("reference", "exchange with experts", exchanged, ("reference",)))
        return parts

    def checkpoint_bytes(self, config: Config, shape: ModelShape) -> int:
        shape = with_mtp(config, shape)
        return saved(config, shape).num_parameters * BYTES[config.model.dtype] + optimizer_bytes(
            config, trained(config, shape)
        )

    def largest_tensor(self, shape: ModelShape) -> int:
        return max(parameter.size for parameter in shape.parameters)  # transformers has one for all experts of a layer

    def num_senders(self, config: Config, num_ranks: int) -> int:
        return num_ranks

    def step_traffic(self, config: Config, shape: ModelShape, num_ranks: int, work: StepWork) -> list[Sent]:
        own, compute = config.trainer.section(FSDP2Config), BYTES[config.trainer.param_dtype]
        is_usual = shape.attends and shape.latent is None and not any(cache.convolved for cache in shape.caches)
        if own.ranks_of_a_row > 1 and not is_usual:
            raise CannotPlanError(f"what ranks that share tokens exchange is not known for {shape.family}")
        part = shape_of_rank(own, shape)
        whole, learnt = with_adapters(config, part), trained(config, part)
        at_once = stays_gathered(whole, compute, learnt.num_parameters)
        return list(step_traffic(config, with_mtp(config, part), num_ranks, work, at_once))

    def changes(self, config: Config, shape: ModelShape) -> dict[str, list[Change]]:
        return {
            "recompute": [(("trainer", "fsdp2", "activation_checkpointing"), True)],
            "ranks": [(("trainer", "fsdp2", "cpu_offload"), True)],
        }

    def rows(self, config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[PlanRow]:
        own, ranks = config.trainer.section(FSDP2Config), len(layout.ranks["trainer"])
        if own.expert_parallel > 1:
            shards = own.num_expert_shards(ranks)
            text = f"{own.expert_parallel} parts of the experts in {shards} shard(s) each"
            yield "split", f"data {ranks} = {ranks} ranks; {text}, other parameters in {ranks} shards"
        elif own.replicas * own.ranks_of_a_row > 1:
            shards = own.num_shards(ranks)
            data = shards // own.context_parallel
            yield (
                "split",
                f"copies {own.replicas} x data {data} x context {own.context_parallel} x tensor {own.tensor_parallel} "
                f"= {ranks} ranks; parameters in {shards} shard(s)",
            )
        yield from unmeasured(config, shape)


PLAN = FSDP2Plan()
