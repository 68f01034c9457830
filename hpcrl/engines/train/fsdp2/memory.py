"""Memory of a rank of the FSDP2 engine: its shard, and gathered parameters. A single rank that need not convert its
parameters has them whole."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, Problem
from hpcrl.engines.train.fsdp2.spec import FSDP2Config, is_whole
from hpcrl.planner.activations import FP32, Tokens, fsdp2_activations, logits_bytes, recomputed_layer, recomputed_scores
from hpcrl.planner.batch import samples_of_an_update
from hpcrl.planner.memory_parts import BYTES, PHASES, Change, Part, Phase, PlanRow
from hpcrl.planner.shapes import ModelShape, Parameter
from hpcrl.planner.trainer import forward_parts

SMALL_MODEL_BYTES = 4 << 30
"""As in engines/train/fsdp2/engine.py."""
LAYERS_GATHERED = 2
"""Gathered layers of a larger model: the computing layer and the prefetched next one; for gradients, the computing
layer and the one being reduced."""
STEP_BYTES = 4
"""Bytes of AdamW's step counter of each tensor."""


def shard_size(shape: ModelShape, num_ranks: int, rank: int = 0) -> int:
    """Numbers in a rank's shard: the rows of every parameter are divided into equal blocks, the last ranks get
    fewer."""
    return sum(_shard_rows(p, num_ranks, rank) * (p.size // p.shape[0]) for p in shape.parameters)


def _shard_rows(parameter: Parameter, num_ranks: int, rank: int) -> int:
    rows = parameter.shape[0]
    block = -(-rows // num_ranks)
    return max(0, min(block, rows - rank * block))


def optimizer_bytes(shape: ModelShape, num_numbers: int, num_bytes: int) -> int:
    """AdamW's two moments, in the type of the weights, and its counters."""
    return 2 * num_numbers * num_bytes + STEP_BYTES * len(shape.parameters)


def _stays_gathered(shape: ModelShape, compute: int, trainable: bool) -> bool:
    return shape.num_parameters * (compute + FP32 * trainable) <= SMALL_MODEL_BYTES


def _gathered_numbers(shape: ModelShape, compute: int, trainable: bool) -> int:
    """Numbers of full parameters that a rank has at once during computation or the reduction of gradients."""
    if _stays_gathered(shape, compute, trainable):
        return shape.num_parameters
    outside = sum(parameter.size for parameter in shape.of_layer(None))
    layer = max(sum(parameter.size for parameter in shape.of_layer(i)) for i in range(shape.num_layers))
    return outside + LAYERS_GATHERED * layer


def gathered_weights(shape: ModelShape, compute: int, trainable: bool) -> int:
    """Bytes of the gathered parameters, in the computation's dtype."""
    return _gathered_numbers(shape, compute, trainable) * compute


def fsdp2_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Parts of the first rank, which has the most rows."""
    if is_whole(config, num_ranks):
        return _whole_parts(config, shape)
    trainer, tokens = config.trainer, Tokens.of(config, -(-samples_of_an_update(config) // num_ranks))
    master, compute = BYTES[config.model.dtype], BYTES[trainer.param_dtype]
    numbers, gathered = shard_size(shape, num_ranks), _gathered_numbers(shape, compute, True)
    own = trainer.section(FSDP2Config)
    offloaded = own.cpu_offload
    activations = fsdp2_activations(shape, tokens, compute, own.activation_checkpointing)
    recomputed = recomputed_layer(shape, tokens, compute) if own.activation_checkpointing else 0
    logits = logits_bytes(shape, tokens, trainer.logits_chunk_tokens, compute, bool(trainer.head_dtype))
    snapshot = numbers * master + optimizer_bytes(shape, numbers, master)
    # Gradients of a gathered model are reduced after the last backward, others after each backward.
    reduced: tuple[Phase, ...] = ("update",) if _stays_gathered(shape, compute, True) else ("train", "update")
    return [
        Part("trainer", "weights", numbers * master, PHASES, offloaded),
        Part("trainer", "optimizer", optimizer_bytes(shape, numbers, master), PHASES, offloaded),
        Part("trainer", "gradients", numbers * master, reduced, offloaded),
        Part("trainer", "gathered weights", gathered * compute, ("train", "update")),
        Part("trainer", "gathered gradients", gathered * FP32, ("train", "update")),
        # Gradients are copied into one buffer before the reduction; a single rank has no reduction.
        Part("trainer", "reduction", gathered * FP32 * (num_ranks > 1), ("update",)),
        Part("trainer", "activations", activations, ("train",)),
        Part("trainer", "recomputed layer", recomputed, ("train",)),
        Part("trainer", "recomputed scores", recomputed_scores(shape, tokens), ("train",)),
        Part("trainer", "logits", logits, ("train",)),
        Part("trainer", "snapshot", snapshot * bool(config.save_every), on_host=True),  # from the first save on
        Part("trainer", "gathered weights", _gathered_to_publish(config, shape), ("publish",)),
    ]


def _gathered_to_publish(config: Config, shape: ModelShape) -> int:
    """Bytes of full weights on a rank that gives them to its own generator: everything, if it stays gathered, and a
    tensor and the next one, in the generator's type. A rank that sends its weights gathers nothing."""
    if not RoleLayout.from_config(config).generates_on_trainers:
        return 0
    wire, compute = BYTES[config.generator.dtype], BYTES[config.trainer.param_dtype]
    whole = shape.num_parameters * compute if _stays_gathered(shape, compute, True) and wire == compute else 0
    return whole + 2 * PLAN.largest_tensor(shape) * wire


def _whole_parts(config: Config, shape: ModelShape) -> list[Part]:
    """Parts of the only rank if its parameters are plain tensors."""
    trainer, samples = config.trainer, samples_of_an_update(config)
    tokens, num_bytes = Tokens.of(config, samples), BYTES[config.model.dtype]
    own, numbers = trainer.section(FSDP2Config), shape.num_parameters
    activations = fsdp2_activations(shape, tokens, num_bytes, own.activation_checkpointing)
    gradients, optimizer = numbers * num_bytes, optimizer_bytes(shape, numbers, num_bytes)
    if samples * config.max_sequence_tokens > trainer.max_tokens_per_micro_batch:
        kept = numbers * FP32  # of the micro-batches before
    else:
        kept = max(0, gradients - activations)  # a backward pass frees activations while it makes gradients
    recomputed = recomputed_layer(shape, tokens, num_bytes) if own.activation_checkpointing else 0
    return [
        Part("trainer", "weights", numbers * num_bytes),
        Part("trainer", "optimizer", optimizer),
        Part("trainer", "gradients", kept, ("train",)),
        Part("trainer", "gradients", gradients, ("update",)),
        Part("trainer", "activations", activations, ("train",)),
        Part("trainer", "recomputed layer", recomputed, ("train",)),
        Part("trainer", "logits", logits_bytes(shape, tokens, trainer.logits_chunk_tokens, num_bytes), ("train",)),
        Part("trainer", "snapshot", (numbers * num_bytes + optimizer) * bool(config.save_every), on_host=True),
    ]


class FSDP2Plan:
    """The TrainPlan (hpcrl.planner.trainer) of FSDP2."""

    def check(self, config: Config, layout: RoleLayout, shape: ModelShape) -> list[Problem]:
        return []

    def trainer_parts(self, config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
        return fsdp2_parts(config, shape, num_ranks)

    def reference_parts(self, config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
        weights = shard_size(shape, num_ranks) * BYTES[config.model.dtype]
        gathered = gathered_weights(shape, BYTES[config.trainer.param_dtype], trainable=False)
        gathered *= not is_whole(config, num_ranks)
        offloaded = config.trainer.section(FSDP2Config).cpu_offload
        return forward_parts(config, shape, num_ranks, weights, gathered, offloaded)

    def checkpoint_bytes(self, config: Config, shape: ModelShape) -> int:
        numbers, master = shape.num_parameters, BYTES[config.model.dtype]
        return numbers * master + optimizer_bytes(shape, numbers, master)

    def largest_tensor(self, shape: ModelShape) -> int:
        return max(parameter.size for parameter in shape.parameters)  # transformers has one for all experts of a layer

    def num_senders(self, config: Config, num_ranks: int) -> int:
        return num_ranks

    def changes(self, config: Config, shape: ModelShape) -> dict[str, list[Change]]:
        return {
            "recompute": [(("trainer", "fsdp2", "activation_checkpointing"), True)],
            "ranks": [(("trainer", "fsdp2", "cpu_offload"), True)],
        }

    def rows(self, config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[PlanRow]:
        return iter(())


PLAN = FSDP2Plan()
