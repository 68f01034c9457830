"""Bytes that autograd keeps between a forward and its backward pass: the sum over the tensors of each operation.

FSDP2 runs transformers' layers operation by operation, and the sums below follow that code. RMSNorm computes in fp32
and keeps its input and result; a linear layer keeps its input; attention keeps q, k, v and its output. The backward
pass recomputes attention scores. No kernel computes Gemma 2's scores, so they are recomputed by blocks of queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcrl.config import Config
from hpcrl.models.shape import ModelShape
from hpcrl.models.tower import Tower
from hpcrl.planner.image_memory import image_tokens_of_row, tower_activations, tower_forward
from hpcrl.planner.layer_memory import Flow, LayerMemory, measured_layers
from hpcrl.planner.memory_parts import BYTES, PlanRow, has_gpus

FP32 = 4
INDEX = 8
"""Bytes of a position or token id."""
QUERY_BLOCK = 256
"""Equal to the block size in engines/blocked_attention.py."""
MASKED_PAIRS = 1 << 24
"""Equal to MAX_MASKED in engines/train/fsdp2/packed_attention.py."""
LOGITS_BLOCK = 1 << 24
"""Maximum logits in a trainer's softmax, and numbers of the vocabulary matrix that it converts at once (BLOCK_NUMBERS
in engines/train/fsdp2/logits.py)."""


@dataclass(frozen=True)
class Tokens:
    """Token counts of one micro-batch: all tokens, tokens with a loss, tokens of the longest sequence, tokens of
    different images."""

    total: int
    predicted: int
    longest: int
    of_images: int = 0

    @classmethod
    def of(cls, config: Config, num_sequences: int, tower: Tower | None = None) -> Tokens:
        """The largest micro-batch of a rank with this many sequences: the token limit, or one row of maximum length if
        that is longer. Rows are packed by their real lengths, so all of its tokens may be of images. Both answers of a
        pair are in one micro-batch."""
        in_pairs = config.row_kind == "pairs" or config.pairs_per_group > 0
        row = config.max_row_tokens * (2 if in_pairs else 1)
        total = max(min(config.trainer.max_tokens_per_micro_batch, num_sequences * row), row)
        images = min(num_sequences * image_tokens_of_row(config, tower), total)
        return cls(total, total, config.max_trained_tokens, images)

    def of_rows(self, num_bytes: int) -> int:
        """Bytes of all tokens, from the bytes of one row of the longest sequence."""
        return -(-num_bytes * self.total // self.longest)

    def shared(self, num_ranks: int) -> Tokens:
        """One rank's part if num_ranks ranks split the tokens; each of them computes all images."""
        return Tokens(-(-self.total // num_ranks), -(-self.predicted // num_ranks), self.longest, self.of_images)


def fsdp2_activations(shape: ModelShape, tokens: Tokens, num_bytes: int, checkpointing: bool, gpu: bool = True) -> int:
    """Bytes kept for the backward pass of one micro-batch, with num_bytes bytes per number in the compute dtype. With
    activation checkpointing, each layer keeps only its input. gpu: whether layers are computed on one, here and
    below."""
    hidden = shape.hidden_size
    outside = positions_bytes(shape, tokens, num_bytes, gpu)
    outside += tokens.total * norm_bytes(shape, hidden, num_bytes)
    outside += tokens.predicted * (hidden * num_bytes + INDEX + 2 * FP32)
    outside += tower_activations(shape.tower, tokens.of_images, num_bytes, checkpointing)
    if checkpointing:
        return outside + shape.num_layers * tokens.total * hidden * num_bytes
    return outside + sum(layer_bytes(shape, layer, tokens, num_bytes, gpu) for layer in range(shape.num_layers))


def positions_bytes(shape: ModelShape, tokens: Tokens, num_bytes: int, gpu: bool = True) -> int:
    """Bytes of cosines, sines, token ids and masks, which the whole backward pass needs."""
    ids = tokens.total * INDEX + (0 if gpu else masks_bytes(shape, tokens, num_bytes))
    if memory := measured(shape, tokens, num_bytes, gpu):
        return ids + tokens.of_rows(sum(layer.rotations for layer in memory))
    return ids + tokens.total * 2 * shape.head_dim * num_bytes


def masks_bytes(shape: ModelShape, tokens: Tokens, num_bytes: int) -> int:
    """Bytes of the masks for rows that share their first token, which attention without a kernel for sequences of
    different lengths makes once in each micro-batch: one for the layers with a window, and one for the others."""
    rows = max(1, tokens.total // tokens.longest)
    pairs = min((rows - 1) * (tokens.longest - 1) * tokens.longest, MASKED_PAIRS)
    kinds = 2 if shape.decoder.windows == "by layer" and not shape.decoder.window_switch else 1
    return pairs * kinds * num_bytes * shape.attends


def measured(shape: ModelShape, tokens: Tokens, num_bytes: int, gpu: bool = True) -> tuple[LayerMemory, ...]:
    """The memory of each layer for one row of the longest sequence; empty if the formulas below are used."""
    dtype = "float32" if num_bytes == FP32 else "bfloat16"
    return () if shape.source is None else measured_layers(shape.source, tokens.longest, dtype, gpu)


def unmeasured(config: Config, shape: ModelShape) -> Iterator[PlanRow]:
    """A row if formulas stand for layers that could not be measured."""
    tokens = Tokens.of(config, 1)
    gpu = has_gpus(config, ("trainer",))
    if shape.source is not None and not measured(shape, tokens, BYTES[config.trainer.param_dtype], gpu):
        name = shape.family or "the model"
        yield "", f"note: layers of {name} did not run on the meta device; memory is that of Llama-like layers"


def flows(shape: ModelShape, layer: int, tokens: Tokens, num_bytes: int, gpu: bool = True) -> list[Flow]:
    """The moments of a layer's backward pass, with all bytes of the layer; or one, with the gradients of its result and
    of two of its widest tensors beside what it keeps, and all of its parameters' gradients."""
    if memory := measured(shape, tokens, num_bytes, gpu):
        return [flow._replace(num_bytes=tokens.of_rows(flow.num_bytes)) for flow in memory[layer].flows]
    flowing = tokens.total * (shape.hidden_size + 2 * _widest(shape)) * num_bytes
    return [Flow(layer_bytes(shape, layer, tokens, num_bytes, gpu) + flowing, 1.0, None)]


def recomputed_flows(shape: ModelShape, layer: int, tokens: Tokens, num_bytes: int, gpu: bool = True) -> list[Flow]:
    """flows() of a layer that is recomputed: those of a kept layer, and measured ones with the recomputation, which
    stops at the last tensor that is kept. In ten of 46 cases of tests the latter alone plan .1 to 4 % less."""
    memory = measured(shape, tokens, num_bytes, gpu)
    with_recomputation = memory[layer].recomputed if memory else ()
    found = [flow._replace(num_bytes=tokens.of_rows(flow.num_bytes)) for flow in with_recomputation]
    return found + flows(shape, layer, tokens, num_bytes, gpu)


def computing_bytes(shape: ModelShape, layer: int, tokens: Tokens, num_bytes: int, gpu: bool = True) -> int:
    """The most bytes of a layer in the forward pass of which autograd keeps something, without its input; 0 if this is
    not more than in its backward pass."""
    memory = measured(shape, tokens, num_bytes, gpu)
    return tokens.of_rows(memory[layer].computing) if memory else 0


def own_input_bytes(shape: ModelShape, layer: int, tokens: Tokens, num_bytes: int, gpu: bool = True) -> int:
    """Bytes of a layer's input if autograd keeps it: RMSNorm does, if this is its input in fp32."""
    if memory := measured(shape, tokens, num_bytes, gpu):
        return tokens.of_rows(memory[layer].own_input)
    return tokens.total * shape.hidden_size * FP32 if num_bytes == FP32 else 0


def recomputed_scores(shape: ModelShape, tokens: Tokens) -> int:
    """Bytes for a block of Gemma 2's soft-capped scores in the backward pass: their tanh, softmax and two gradients."""
    block = min(tokens.longest, QUERY_BLOCK)
    return 4 * FP32 * tokens.total * shape.num_heads * block if shape.decoder.soft_capped else 0


def forward_only(shape: ModelShape, tokens: Tokens, num_bytes: int, gpu: bool = True) -> int:
    """Peak bytes of one layer if nothing is kept for a backward pass."""
    if memory := measured(shape, tokens, num_bytes, gpu):
        return tokens.of_rows(max(layer.forward for layer in memory))
    layer = max(layer_bytes(shape, layer, tokens, num_bytes, gpu) for layer in range(shape.num_layers))
    layer += 2 * tokens.total * shape.hidden_size * num_bytes
    return max(layer, tower_forward(shape.tower, tokens.of_images, num_bytes))


def _widest(shape: ModelShape) -> int:
    """Numbers per token of the widest tensor of a layer."""
    dense = shape.intermediate_size if len(shape.expert_layers) < shape.num_layers else 0
    return max(dense, shape.experts_per_token * max(shape.hidden_size, 2 * shape.expert_size), shape.query_size)


def norm_bytes(shape: ModelShape, size: int, num_bytes: int) -> int:
    """Bytes per token: the input in fp32, the normalised input (for Gemma 2 and 3 also in fp32) and the scale."""
    return size * (FP32 + (FP32 if shape.decoder.gemma else num_bytes)) + FP32


def layer_bytes(shape: ModelShape, layer: int, tokens: Tokens, num_bytes: int, gpu: bool = True) -> int:
    """Bytes that autograd saves in a layer."""
    if memory := measured(shape, tokens, num_bytes, gpu):
        return tokens.of_rows(memory[layer].kept)
    hidden, query, key = shape.hidden_size, shape.query_size, shape.key_size
    kept = (4 if shape.decoder.gemma else 2) * norm_bytes(shape, hidden, num_bytes)
    kept += 2 * hidden * num_bytes  # input of attention and of the feed-forward layer
    kept += query * num_bytes  # input of the output projection
    if shape.decoder.qk_norm:
        kept += norm_bytes(shape, query, num_bytes) + norm_bytes(shape, key, num_bytes)
        kept += FP32 * (shape.num_heads + shape.num_kv_heads - 2)  # one scale per head
    if shape.decoder.soft_capped:
        kept += (query + 2 * key) * num_bytes  # the rest is recomputed (recomputed_scores)
    else:
        kept += (2 * query + 2 * key) * num_bytes + FP32 * shape.num_heads
    if layer in shape.expert_layers:
        routed = (2 * hidden + 4 * shape.expert_size) * num_bytes + 4 * INDEX
        kept += shape.experts_per_token * routed + FP32 * shape.num_experts + 4 * shape.shared_size * num_bytes
    else:
        kept += 4 * shape.intermediate_size * num_bytes
    return tokens.total * kept


def forward_logits_bytes(
    shape: ModelShape, tokens: Tokens, chunk_tokens: int, num_bytes: int, float32_head: bool = False
) -> int:
    """Bytes of a chunk of logits in fp32, and of the other tensors at that time: the projection's result and gradient
    in the compute dtype, or the softmax of a block of rows. With float32_head, the hidden states and blocks of the
    matrix are converted to fp32 for the projection."""
    chunk = min(chunk_tokens, tokens.predicted) * shape.vocab_size
    blocks = 2 * min(chunk, LOGITS_BLOCK) * FP32
    beside = blocks if num_bytes == FP32 else max(blocks, chunk * num_bytes)
    if float32_head and num_bytes != FP32:
        rows = min(chunk_tokens, tokens.predicted)
        beside = max(beside, (min(_matrix(shape), LOGITS_BLOCK) + rows * shape.hidden_size) * FP32)
    return chunk * FP32 + beside


def logits_bytes(
    shape: ModelShape, tokens: Tokens, chunk_tokens: int, num_bytes: int, float32_head: bool = False, gpu: bool = True
) -> int:
    """Bytes of the head's backward pass: the hidden states' gradient; the matrix's gradient, which is summed in fp32;
    and a chunk of logits with the tensors beside it or, in the compute dtype, this chunk's gradients of logits and
    matrix. A CPU also converts the latter to fp32."""
    chunk, matrix = min(chunk_tokens, tokens.predicted) * shape.vocab_size, _matrix(shape)
    converted = matrix * FP32 if num_bytes < FP32 and not gpu else 0
    of_matrix = (chunk + matrix) * num_bytes + converted
    of_logits = forward_logits_bytes(shape, tokens, chunk_tokens, num_bytes, float32_head)
    return tokens.predicted * shape.hidden_size * num_bytes + matrix * FP32 + max(of_logits, of_matrix)


def _matrix(shape: ModelShape) -> int:
    return shape.vocab_size * shape.hidden_size
