"""Bytes that a rank of a Megatron-Core trainer sends in an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.config import Config
from hpcrl.engines.train.megatron.parallel import Degrees, StageLayers, own, padded_vocabulary
from hpcrl.engines.train.megatron.spec import MegatronConfig
from hpcrl.models.shape import ModelShape
from hpcrl.planner.activations import FP32
from hpcrl.planner.memory_parts import BYTES
from hpcrl.planner.traffic import Sent, StepWork, exchanged


def stage_traffic(
    config: Config,
    shape: ModelShape,
    num_ranks: int,
    work: StepWork,
    stages: Sequence[StageLayers],
    numbers: Sequence[tuple[int, int]],
) -> list[list[Sent]]:
    """Bytes that a rank of each stage sends.

    Args:
        numbers: per stage, a rank's numbers of parameters outside experts, and of experts.

    - Gradients, in fp32: a reduce-scatter among data and context parallel ranks, of experts among their copies; without
      the distributed optimizer an all-reduce. A tied embedding: an all-reduce of its gradient between the first and the
      last stage.
    - Parameters, in their type, after the update: an all-gather among these ranks. With experts each is sent twice: the
      optimizers of experts and of other parameters each gather all buffers, unless overlap_parameters leaves it to the
      next forward pass.
    - Tensor parallelism: an all-reduce of all tokens' states after each pair of matrices (two a layer; a layer of
      experts has one) in the forward pass, one before it in the backward pass, and one each at the embedding and at the
      head. Sequence parallelism: instead of the all-reduce a gather before a pair and a reduce-scatter after it, the
      reverse in the backward pass, and a second gather of a pair's input there (arXiv 2205.05198).
    - Context parallelism: keys and values are gathered in the forward pass and again in the backward pass, and their
      gradients summed by a reduce-scatter (as many bytes as Transformer Engine's ring).
    - Experts: each token is sent to its experts and back in both passes by an all-to-all among the expert parallel
      ranks; expert tensor parallel ranks gather the received tokens and reduce-scatter the results, and the reverse in
      the backward pass. Experts get equal shares of the tokens.
    - Pipeline: each chunk sends all tokens' states to the next, which sends back their gradients.

    recompute=full repeats the exchanges of a layer's forward pass. Numbers per token other than states (expert weights,
    log-probs) are not counted.
    """
    return [
        [
            *_reductions(config, shape, num_ranks, number, numbers[number]),
            *_activations(config, shape, work, stages, number),
        ]
        for number in range(len(stages))
    ]


def _reductions(
    config: Config, shape: ModelShape, num_ranks: int, stage: int, numbers: tuple[int, int]
) -> Iterator[Sent]:
    megatron, compute = own(config), BYTES[config.trainer.param_dtype]
    degrees = Degrees.of(megatron, num_ranks)
    gathers = 2 if numbers[1] and not megatron.overlap_parameters else 1
    for size, ranks in zip(numbers, (degrees.optimizer, degrees.expert_data), strict=True):
        if megatron.distributed_optimizer:
            yield from exchanged("parameters", "all_gather", gathers * size * compute, ranks)
            yield from exchanged("gradients", "reduce_scatter", size * FP32, ranks)
        else:
            yield from exchanged("gradients", "all_reduce", size * FP32, ranks)
    if shape.tied and megatron.pipeline_parallel > 1 and stage in (0, megatron.pipeline_parallel - 1):
        rows = padded_vocabulary(shape.vocab_size, megatron) // megatron.tensor_parallel
        yield from exchanged("gradients", "all_reduce", rows * shape.hidden_size * FP32, 2)


def _activations(
    config: Config, shape: ModelShape, work: StepWork, stages: Sequence[StageLayers], stage: int
) -> Iterator[Sent]:
    megatron, compute = own(config), BYTES[config.trainer.param_dtype]
    tensor, context = megatron.tensor_parallel, megatron.context_parallel
    layers, is_last = [layer for chunk in stages[stage] for layer in chunk], stage == len(stages) - 1
    with_experts = sum(layer in shape.expert_layers for layer in layers)
    forwards = 2 if megatron.recompute == "full" else 1
    states = -(-work.num_tokens // context) * shape.hidden_size * compute
    yield from _pairs(megatron, shape, states, len(layers), with_experts, (stage == 0) + is_last)
    keys = 2 * max(1, shape.num_kv_heads // tensor) * shape.head_dim * compute * work.num_tokens * len(layers)
    yield from exchanged("attention", "all_gather", (forwards + 1) * keys, context)
    yield from exchanged("attention", "reduce_scatter", keys, context)
    shared = tensor if megatron.sequence_parallel else 1
    routed = with_experts * (forwards + 1) * shape.experts_per_token * (states // shared)
    yield from exchanged("experts", "all_to_all", 2 * routed, megatron.expert_parallel)
    within = megatron.expert_tensor_parallel
    yield from exchanged("experts", "all_gather", within * routed, within)
    yield from exchanged("experts", "reduce_scatter", within * routed, within)
    chunks = len(stages[stage])
    hops = 2 * chunks - is_last - (stage == 0) if len(stages) > 1 else 0
    if hops:
        yield Sent("stages", "send", hops * (states // shared))


def _pairs(
    megatron: MegatronConfig, shape: ModelShape, states: int, num_layers: int, with_experts: int, ends: int
) -> Iterator[Sent]:
    """Traffic of the tensor parallel ranks; ends: how many of embedding and head are among the layers."""
    pairs, forwards = 2 * num_layers - with_experts, 2 if megatron.recompute == "full" else 1
    if not megatron.sequence_parallel:
        yield from exchanged(
            "activations", "all_reduce", ((forwards + 1) * pairs + ends) * states, megatron.tensor_parallel
        )
        return
    gathers, sums = (forwards + 2) * pairs + ends, (forwards + 1) * pairs + ends
    yield from exchanged("activations", "all_gather", gathers * states, megatron.tensor_parallel)
    yield from exchanged("activations", "reduce_scatter", sums * states, megatron.tensor_parallel)
