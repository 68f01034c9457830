"""Log-probabilities and entropies of tokens from hidden states, in chunks of the vocabulary projection.

The [tokens, vocabulary] logits are the largest tensor of a training step (16384 x 151936 in fp32: 10 GB, with softmax
and gradient 30 GB). Only one chunk of logits exists at a time. The backward pass recomputes each chunk and overwrites
it with its gradient, one block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpcrl.models.families import family_of

BLOCK_NUMBERS = 1 << 24
"""Maximum elements per softmax and per dtype conversion of the weight, which limits temporary memory besides the chunk.
"""


@dataclass(frozen=True)
class Head:
    """The output head: softcap(hidden @ weight.T + bias) * scale, with softcap(z) = cap * tanh(z / cap).

    Args:
        softcap: Gemma 2's final_logit_softcapping (arXiv 2408.00118).
        scale: Cohere's logit_scale, Falcon-H1's lm_head_multiplier, HyperCLOVA X's logits_scaling, or the inverse of
            Granite's and MiniCPM3's logits_scaling.
        float32: Sum products of bfloat16 numbers in float32 and keep the result (arXiv 2506.13585), instead of rounding
            logits to bfloat16. Products for the gradient stay in bfloat16.
    """

    softcap: float | None = None
    scale: float = 1.0
    float32: bool = False

    @classmethod
    def from_config(cls, config: Any) -> Head:
        """The head for a transformers config, which must be the text config of a multimodal model."""

        def value(*names: str) -> float | None:
            return next((given for name in names if (given := getattr(config, name, None))), None)

        scaling = value("logits_scaling") or 1.0
        scale = value("logit_scale", "lm_head_multiplier") or 1.0
        scale *= scaling if family_of(config.model_type).multiplies_logits else 1.0 / scaling
        return cls(value("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"), scale)


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, temperature: float) -> Tensor:
    """The softmax's input, softcap(hidden @ weight.T + bias) * scale / temperature, float32 [N, V]."""
    logits = project(hidden, weight, bias, head.float32)
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
    factor = head.scale / temperature
    return logits if factor == 1.0 else logits.mul_(factor)


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None, in_float32: bool) -> Tensor:
    """float32 [N, V]: hidden @ weight.T + bias, summed and kept in float32 or rounded to the inputs' type."""
    if not in_float32 or weight.dtype == torch.float32:
        return torch.nn.functional.linear(hidden, weight, bias).float()
    if hidden.is_cuda:
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:  # no such kernel: convert blocks of the matrix
        states, size = hidden.float(), max(1, BLOCK_NUMBERS // weight.shape[1])
        logits = states.new_empty(len(states), len(weight))
        for first in range(0, len(weight), size):
            words = slice(first, first + size)
            torch.mm(states, weight[words].float().T, out=logits[:, words])
    return logits if bias is None else logits.add_(bias)


def blocks_of(logits: Tensor, start: int, num_copies: int = 1) -> Iterator[tuple[slice, Tensor]]:
    """Yield (positions among all tokens, rows of the chunk) for blocks of which num_copies together have at most
    BLOCK_NUMBERS logits, but at least one row. `start` is the chunk's first position."""
    size = max(1, BLOCK_NUMBERS // (num_copies * logits.shape[1]))
    for first in range(0, logits.shape[0], size):
        block = logits[first : first + size]
        yield slice(start + first, start + first + len(block)), block


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        with_hits: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        entropy = torch.zeros_like(logprobs)
        hits = torch.zeros_like(targets, dtype=torch.bool)
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = scaled_logits(hidden[chunk], weight, bias, head, temperature)
            for rows, block in blocks_of(logits, start):
                log_p = block.log_softmax(-1)
                logprobs[rows] = log_p.gather(1, targets[rows, None])[:, 0]
                if with_hits:
                    hits[rows] = block.argmax(-1) == targets[rows]
                if with_entropy:
                    entropy[rows] = -log_p.exp().mul_(log_p).sum(-1)
                del block, log_p
            del logits  # before the next chunk is made
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.head, ctx.temperature, ctx.chunk_tokens = head, temperature, chunk_tokens
        ctx.set_materialize_grads(False)  # None if no loss uses the entropy, which is mostly for the log
        ctx.mark_non_differentiable(hits)
        return logprobs, entropy, hits

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Any) -> tuple[Any, ...]:
        """With z the scaled logits and p = softmax(z): dlogprob/dz = onehot - p, dentropy/dz = -p (log p + entropy)."""
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        head, factor = ctx.head, ctx.head.scale / ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, hidden.shape[0], ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            grad = scaled_logits(hidden[chunk], weight, bias, head, ctx.temperature)
            for rows, block in blocks_of(grad, start):
                slope = None if head.softcap is None else 1 - (block / (factor * head.softcap)).square_()
                coefficient = grad_logprobs[rows, None]
                if grad_entropy is not None:
                    log_p = block.log_softmax(-1)
                    coefficient = (log_p + entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(coefficient)
                    torch.mul(log_p.exp_(), coefficient.neg_(), out=block)
                    del log_p
                else:
                    torch.mul(block.softmax(-1), -coefficient, out=block)
                block.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
                if factor != 1.0:
                    block.mul_(factor)
                if slope is not None:
                    block.mul_(slope)
                del block, coefficient, slope
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[chunk]
            del grad  # before the next chunk is made
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    head: Head,
    temperature: float,
    chunk_tokens: int,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """(log-probs, entropies or None) of softmax(logits / temperature), both float32 [N], in nats, differentiable.

    Args:
        hidden: [N, h], the states before the tokens to predict.
        weight: [V, h], the vocabulary projection.
        bias: [V].
        targets: int64 [N], the tokens to predict.
        chunk_tokens: At most chunk_tokens x V logits exist at once in either pass.
    """
    given = (hidden, weight, bias, targets, head, temperature, chunk_tokens, entropy, False)
    logprobs, entropies, _ = _TokenLogprobs.apply(*given)
    return logprobs, entropies if entropy else None


def token_hits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, head: Head, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """(float32 [N], bool [N]): log-probs as from token_logprobs() at temperature 1, and whether the target is the most
    probable token."""
    logprobs, _, hits = _TokenLogprobs.apply(hidden, weight, bias, targets, head, 1.0, chunk_tokens, False, True)
    return logprobs, hits
