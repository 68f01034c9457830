"""Bytes that a rank of the DeepSpeed engine sends in an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config import Config
from hpcrl.models.shape import ModelShape
from hpcrl.planner.activations import FP32
from hpcrl.planner.adapters import trained, with_adapters
from hpcrl.planner.memory_parts import BYTES
from hpcrl.planner.traffic import Sent, StepWork, exchanged


def step_traffic(
    config: Config, shape: ModelShape, num_ranks: int, work: StepWork, stage: int, persistent: int
) -> Iterator[Sent]:
    """Bytes that each rank sends. `persistent` is the size of the parameters that ZeRO-3 keeps gathered.

    Gradients, in fp32: ZeRO-1 and 2 use an all-reduce, of which each rank keeps its shard (DeepSpeed's
    use_multi_rank_bucket_allreduce), ZeRO-1 once per step and ZeRO-2 in each micro-batch. ZeRO-3 uses a reduce-scatter
    in each micro-batch. Parameters, in the compute dtype: an all-gather of the updated parameters, and with ZeRO-3
    another all-gather of every parameter in each forward and in each backward pass.
    """
    compute, learnt = BYTES[config.trainer.param_dtype], trained(config, shape)
    reductions = learnt.num_parameters * FP32 * (1 if stage == 1 else work.num_micro_batches)
    if stage < 3:
        yield from exchanged("parameters", "all_gather", learnt.num_parameters * compute, num_ranks)
        yield from exchanged("gradients", "all_reduce", reductions, num_ranks)
        return
    divided = with_adapters(config, shape).num_parameters - persistent
    gathers = persistent + 2 * work.num_micro_batches * divided
    yield from exchanged("parameters", "all_gather", gathers * compute, num_ranks)
    yield from exchanged("gradients", "reduce_scatter", reductions, num_ranks)
