"""What ranks of the trainer and of the reference keep, whichever engine they run."""

from __future__ import annotations

from hpcrl.config import Config
from hpcrl.planner.activations import FP32, Tokens, forward_only, logits_bytes
from hpcrl.planner.fsdp2 import fsdp2_parts, gathered_weights, optimizer_bytes, shard_size
from hpcrl.planner.megatron import megatron_parts, rank_numbers
from hpcrl.planner.parts import BYTES, PHASES, Part
from hpcrl.planner.shapes import CannotPlanError, ModelShape


def trainer_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Parts of the fullest trainer rank. CannotPlanError for an engine whose memory is not known."""
    match config.trainer.engine:
        case "fsdp2":
            return fsdp2_parts(config, shape, num_ranks)
        case "megatron":
            return megatron_parts(config, shape, num_ranks)
        case engine:
            raise CannotPlanError(f"the memory of trainer.engine={engine} is not known")


def reference_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Parts of the fullest rank of the reference: weights, and one layer of a forward."""
    samples = config.rollout.num_prompts * config.rollout.group_size
    compute, tokens = BYTES[config.trainer.param_dtype], Tokens.of(config, -(-samples // num_ranks))
    if config.trainer.engine == "fsdp2":
        weights = shard_size(shape, num_ranks) * BYTES[config.model.dtype]
        gathered, on_host = gathered_weights(shape, compute, trainable=False), config.trainer.cpu_offload
    else:
        stages = range(config.trainer.megatron.pipeline_parallel)
        weights = max(sum(rank_numbers(shape, config.trainer.megatron, stage)) for stage in stages) * compute
        gathered, on_host = 0, False
    logits = logits_bytes(shape, tokens, config.trainer.logits_chunk_tokens, compute, entropy_loss=False)
    return [
        Part("reference", "weights", weights, PHASES, on_host),
        Part("reference", "gathered weights", gathered, ("reference",)),
        Part("reference", "activations", forward_only(shape, tokens, compute), ("reference",)),
        Part("reference", "logits", logits, ("reference",)),
    ]


def checkpoint_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of the weights and the optimizer's state in one checkpoint, all ranks together.

    CannotPlanError for an engine whose checkpoint is not known.
    """
    numbers, compute = shape.num_parameters, BYTES[config.trainer.param_dtype]
    match config.trainer.engine:
        case "fsdp2":
            master = BYTES[config.model.dtype]
            return numbers * master + optimizer_bytes(shape, numbers, master)
        case "megatron":  # weights, two moments, and a master copy of weights that are not fp32
            return numbers * (compute + 2 * FP32 + FP32 * (compute < FP32))
        case engine:
            raise CannotPlanError(f"the checkpoint of trainer.engine={engine} is not known")
