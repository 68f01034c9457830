"""Bytes that a rank of the FSDP2 engine sends in an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpcrl.config import Config
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.models.shape import ModelShape, Parameter
from hpcrl.planner.activations import FP32
from hpcrl.planner.adapters import trained, with_adapters
from hpcrl.planner.memory_parts import BYTES
from hpcrl.planner.traffic import Sent, StepWork, exchanged
from hpcrl.spec.lora import A, B, adapted, is_adapter


def is_for_muon(parameter: Parameter) -> bool:
    """Whether Muon updates it: a matrix, or a stack of matrices, of a layer (hpcrl.engines.train.fsdp2.muon)."""
    return parameter.in_layers and 2 <= len(parameter.shape) <= 3


def step_traffic(config: Config, part: ModelShape, num_ranks: int, work: StepWork, at_once: bool) -> Iterator[Sent]:
    """Bytes that each rank sends.

    Args:
        part: The model with only one tensor-parallel rank's parameters.
        at_once: Whether the model stays gathered during a step.

    - Parameters: an all-gather among the shards in the compute dtype. It happens once if parameters stay gathered;
      otherwise in each micro-batch, and twice for layers, which are gathered again in the backward pass.
    - Gradients: a reduce-scatter in fp32, once or in each micro-batch; then an all-reduce of the shards among the
      copies of the model and, for parameters that are not split, among tensor-parallel ranks.
    - Tensor parallelism, twice per layer: all tokens' states are gathered before a pair of matrices and
      reduce-scattered after it, and the reverse in the backward pass.
    - Context parallelism, in each layer and both passes: an all-to-all of queries, keys, values and results between
      ranks that split tokens and ranks that split heads.
    - Recomputation in the backward pass repeats the exchanges of what it computes. Muon gathers each matrix.
    """
    own, compute = config.trainer.section(FSDP2Config), BYTES[config.trainer.param_dtype]
    shards, tensor = own.num_shards(num_ranks), own.tensor_parallel
    whole, learnt = with_adapters(config, part), trained(config, part)
    gathers, reductions = whole.num_parameters, learnt.num_parameters
    if not at_once:
        _, outside = whole.gathered_together
        gathers = work.num_micro_batches * (2 * gathers - outside)
        reductions *= work.num_micro_batches
    yield from exchanged("parameters", "all_gather", gathers * compute, shards)
    yield from exchanged("gradients", "reduce_scatter", reductions * FP32, shards)
    yield from exchanged("gradients", "all_reduce", learnt.num_parameters * FP32 // shards, own.replicas)
    splits = {parameter.name: parameter.split for parameter in part.parameters}
    common = sum(parameter.size for parameter in learnt.parameters if not _is_split(parameter, splits))
    yield from exchanged("gradients", "all_reduce", common * BYTES[config.model.dtype] // shards, tensor)
    if config.trainer.optimizer == "muon":
        matrices = sum(p.size for p in learnt.parameters if is_for_muon(p))
        yield from exchanged("matrices for Muon", "all_gather", matrices * compute, shards)
    yield from _activations(own, part, work.num_tokens, compute)


def _is_split(parameter: Parameter, splits: Mapping[str, str]) -> bool:
    """Whether tensor-parallel ranks split a trained parameter; of an adapter, the factor of its matrix's split side."""
    if is_adapter(parameter.name):
        factor = {"column": B, "key": B, "row": A}.get(splits[adapted(parameter.name)])
        return factor is not None and parameter.name.endswith(factor)
    return parameter.split not in ("whole", "vocabulary")


def _activations(own: FSDP2Config, shape: ModelShape, num_tokens: int, num_bytes: int) -> Iterator[Sent]:
    """Exchanges of num_tokens tokens among the ranks that have the same rows."""
    tensor, context = own.tensor_parallel, own.context_parallel
    tokens, forwards = -(-num_tokens // context), 2 if own.activation_checkpointing else 1
    states = 2 * shape.num_layers * (forwards + 1) * tokens * shape.hidden_size * num_bytes
    yield from exchanged("activations", "all_gather", states, tensor)
    yield from exchanged("activations", "reduce_scatter", states, tensor)
    kv_heads = shape.num_kv_heads // tensor
    repeats = max(1, context // kv_heads)  # with fewer key heads than ranks, heads are repeated
    width = 2 * (shape.num_heads // tensor + kv_heads * repeats) * shape.head_dim
    swapped = shape.num_layers * (forwards + 1) * tokens * width * num_bytes
    yield from exchanged("attention", "all_to_all", swapped, context)
