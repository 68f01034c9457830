"""Bytes that Megatron's fused layers keep for the backward pass (arXiv 2205.05198, without dropout, with flash
attention), and layers with a gated delta rule."""

from __future__ import annotations

from hpcrl.engines.train.megatron.spec import MegatronConfig
from hpcrl.models.delta import delta_layers
from hpcrl.models.families import with_decoder
from hpcrl.models.shape import ModelShape
from hpcrl.planner.activations import FP32, INDEX, Tokens, layer_bytes


def megatron_activations(
    shape: ModelShape, megatron: MegatronConfig, tokens: Tokens, layers: list[int], num_bytes: int
) -> tuple[int, int]:
    """(bytes kept per micro-batch in flight, bytes of one layer while it is recomputed) for these layers."""
    total, shape = -(-tokens.total // megatron.context_parallel), with_decoder(shape)
    recurrent = delta_layers(shape)
    whole = [
        _delta_layer(shape, megatron, layer, tokens, num_bytes)
        if layer in recurrent
        else _megatron_layer(shape, megatron, layer, total, num_bytes)
        for layer in layers
    ]
    if megatron.recompute != "full":
        return sum(whole), 0
    split = megatron.tensor_parallel if megatron.sequence_parallel else 1
    return len(layers) * total * shape.hidden_size * num_bytes // split, max(whole, default=0)


def _delta_layer(shape: ModelShape, megatron: MegatronConfig, layer: int, tokens: Tokens, num_bytes: int) -> int:
    """As many bytes as transformers' layer, whose recurrence this is, on ranks that divide heads and experts' tokens.
    Without sequence parallelism, each rank has the input and output of both norms."""
    tensor = megatron.tensor_parallel
    outer = 0 if megatron.sequence_parallel else 4 * shape.hidden_size * num_bytes * tokens.total
    return layer_bytes(shape, layer, tokens, num_bytes) // tensor + outer * (tensor - 1) // tensor


def _megatron_layer(shape: ModelShape, megatron: MegatronConfig, layer: int, tokens: int, num_bytes: int) -> int:
    """Sequence parallelism splits a token's numbers outside the matrices, tensor parallelism those inside."""
    tensor = megatron.tensor_parallel
    outer = tensor if megatron.sequence_parallel else 1
    hidden = shape.hidden_size
    kept = 4 * hidden * num_bytes // outer  # input and output of two norms
    kept += 2 * (shape.query_size + shape.key_size) * num_bytes // tensor + FP32 * shape.num_heads // tensor
    if shape.decoder.gated_attention:  # the gates, and what they multiply
        kept += 2 * shape.query_size * num_bytes // tensor
    if shape.decoder.qk_norm:
        kept += (shape.query_size + shape.key_size) * num_bytes // tensor
    if layer in shape.expert_layers:
        routed = (hidden + 3 * shape.expert_size // megatron.expert_tensor_parallel) * num_bytes + 2 * INDEX
        routed *= shape.experts_per_token * megatron.expert_tensor_parallel
        kept += (routed + 2 * FP32 * shape.num_experts) // outer + 3 * shape.shared_size * num_bytes // tensor
    else:
        kept += 3 * shape.intermediate_size * num_bytes // tensor
    return tokens * kept
