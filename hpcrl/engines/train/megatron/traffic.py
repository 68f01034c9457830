"""Bytes that a rank of a Megatron-Core trainer sends in an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.config import Config
from hpcrl.engines.train.megatron.parallel import Degrees, StageLayers, own, padded_vocabulary
from hpcrl.engines.train.megatron.spec import MegatronConfig
from hpcrl.models.shape import ModelShape
from hpcrl.planner.activations import FP32
from hpcrl.planner.adapters import trained
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
        numbers: For each stage, a rank's number of trained parameters outside experts, and in experts.

    - Gradients, in fp32: a reduce-scatter among data- and context-parallel ranks; for experts, among their copies.
      Without the distributed optimizer, it is an all-reduce. The gradient of a tied embedding is also all-reduced
      between the first and the last stage.
    - Parameters, in their dtype, after the update: an all-gather among these ranks. With experts, each parameter is
      sent twice, because the optimizers of experts and of other parameters each gather all buffers, unless
      overlap_parameters leaves this to the next forward pass.
    - Tensor parallelism: an all-reduce of all tokens' states after each pair of matrices in the forward pass and before
      it in the backward pass, and one each at the embedding and at the head. A layer has two pairs, a layer of experts
      one. With sequence parallelism, there is a gather before and a reduce-scatter after a pair instead, the reverse in
      the backward pass, and a second gather of a pair's input there (arXiv 2205.05198).
    - Context parallelism: keys and values are gathered in the forward pass and again in the backward pass, and their
      gradients are summed by a reduce-scatter (as many bytes as in Transformer Engine's ring).
    - Experts: in both passes, an all-to-all among expert-parallel ranks sends each token to its experts and back.
      Expert tensor-parallel ranks gather the received tokens and reduce-scatter the results, and the reverse in the
      backward pass. Experts are assumed to get equal shares of the tokens.
    - Pipeline: each chunk sends all tokens' states to the next chunk, which sends back their gradients.

    recompute=full repeats the exchanges of a layer's forward pass. Numbers per token other than states (expert weights,
    log-probs) are not counted, nor are tokens' states between an adapter's two matrices, which have only its rank's
    width. The gather of a pair's input for its gradients is counted even if its matrices are frozen.
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
    learns_table = any(parameter.split == "vocabulary" for parameter in trained(config, shape).parameters)
    is_end = megatron.pipeline_parallel > 1 and stage in (0, megatron.pipeline_parallel - 1)
    if shape.tied and learns_table and is_end:
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
    """Traffic among tensor-parallel ranks. `ends` is how many of embedding and head belong to the layers."""
    pairs, forwards = 2 * num_layers - with_experts, 2 if megatron.recompute == "full" else 1
    if not megatron.sequence_parallel:
        yield from exchanged(
            "activations", "all_reduce", ((forwards + 1) * pairs + ends) * states, megatron.tensor_parallel
        )
        return
    gathers, sums = (forwards + 2) * pairs + ends, (forwards + 1) * pairs + ends
    yield from exchanged("activations", "all_gather", gathers * states, megatron.tensor_parallel)
    yield from exchanged("activations", "reduce_scatter", sums * states, megatron.tensor_parallel)
