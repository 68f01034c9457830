"""Log-probabilities and entropies of tokens from hidden states, by chunks of the vocabulary projection.

The [tokens, vocabulary] logits are the largest tensor of a training step (16384 x 151936 in fp32: 10 GB, with its
softmax and gradient three times that). Only one chunk of them exists at a time; the backward pass computes it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """How logits are made: softcap(hidden @ weight.T + bias) * scale, with softcap(z) = cap * tanh(z / cap).

    `softcap` is Gemma 2's final_logit_softcapping (arXiv 2408.00118), `scale` Cohere's logit_scale or the inverse of
    Granite's logits_scaling.
    """

    softcap: float | None = None
    scale: float = 1.0

    @classmethod
    def from_config(cls, config: Any) -> Head:
        """The head a transformers config describes."""
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(getattr(config, "final_logit_softcapping", None), scale)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, temperature: float) -> Tensor:
    """float32 [N, V]: what softmax is taken of."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
    factor = head.scale / temperature
    return logits if factor == 1.0 else logits.mul_(factor)


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
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        entropy = torch.zeros_like(logprobs)
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            log_p = _logits(hidden[chunk], weight, bias, head, temperature).log_softmax(-1)
            logprobs[chunk] = log_p.gather(1, targets[chunk, None])[:, 0]
            if with_entropy:
                entropy[chunk] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.head, ctx.temperature, ctx.chunk_tokens = head, temperature, chunk_tokens
        ctx.set_materialize_grads(False)  # the entropy is mostly for the log: None says that no loss has it
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """With z the scaled logits and p = softmax(z): dlogprob/dz = onehot - p, dentropy/dz = -p (log p + entropy)."""
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        head, factor = ctx.head, ctx.head.scale / ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, hidden.shape[0], ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            logits = _logits(hidden[chunk], weight, bias, head, ctx.temperature)
            slope = None if head.softcap is None else 1 - (logits / (factor * head.softcap)).square_()
            coefficient = grad_logprobs[chunk, None]
            if grad_entropy is not None:
                log_p = logits.log_softmax(-1)
                coefficient = (log_p + entropy[chunk, None]).mul_(grad_entropy[chunk, None]).add_(coefficient)
                grad = log_p.exp_().mul_(coefficient.neg_())
            else:
                grad = logits.softmax(-1).mul_(-coefficient)
            grad.scatter_add_(1, targets[chunk, None], grad_logprobs[chunk, None])
            if factor != 1.0:
                grad.mul_(factor)
            if slope is not None:
                grad.mul_(slope)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            grad_weight += grad.T @ hidden[chunk]
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None, None, None


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

    hidden [N, h] stands before the token to predict, targets int64 [N] are those tokens, weight [V, h] and bias [V]
    are the vocabulary projection. No more than `chunk_tokens` x V logits exist at once, in either pass.
    """
    logprobs, entropies = _TokenLogprobs.apply(hidden, weight, bias, targets, head, temperature, chunk_tokens, entropy)
    return logprobs, entropies if entropy else None
