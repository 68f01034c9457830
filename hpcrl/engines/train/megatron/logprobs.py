"""Log-probabilities and entropies of tokens if each rank of a group has a part of the vocabulary matrix.

Logits are never gathered: ranks exchange three numbers per token, four with entropies. Only one chunk of logits (tokens
x the rank's vocabulary rows) exists at a time. The backward pass recomputes it and overwrites it with its gradient, one
block of rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.engines.train.fsdp2.logits import blocks_of, project


class _VocabularyLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        num_words: int,
        temperature: float,
        chunk_tokens: int,
        float32_head: bool,
        with_entropy: bool,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.zeros_like(logprobs)
        log_sums = torch.empty_like(logprobs)
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = project(hidden[rows], weight[:num_words], None, float32_head).div_(temperature)
            top = logits.amax(-1) if num_words else logits.new_full((len(logits),), -torch.inf)
            dist.all_reduce(top, dist.ReduceOp.MAX, group)
            logits -= top[:, None]
            mine, places = _own(targets[rows], num_words, group, weight)
            # The target's logit, the sum of exponentials and, for the entropy, of their products with the logits.
            shared = logits.new_zeros(2 + with_entropy, len(logits))
            if num_words:
                shared[0] = torch.where(mine, logits.gather(1, places[:, None])[:, 0], 0.0)
                for part, block in blocks_of(logits, 0):
                    exponentials = block.exp()
                    shared[1, part] = exponentials.sum(-1)
                    if with_entropy:
                        shared[2, part] = exponentials.mul_(block).sum(-1)
                    del block, exponentials
            dist.all_reduce(shared, group=group)
            log_sum = shared[1].log()
            logprobs[rows] = shared[0] - log_sum
            if with_entropy:
                entropy[rows] = log_sum - shared[2] / shared[1]
            log_sums[rows] = top + log_sum
            del logits  # before the next chunk is made
        ctx.save_for_backward(hidden, weight, targets, entropy, log_sums)
        ctx.num_words, ctx.temperature, ctx.chunk_tokens, ctx.group = num_words, temperature, chunk_tokens, group
        ctx.float32_head = float32_head
        ctx.set_materialize_grads(False)  # None if no loss uses the entropy, which is mostly for the log
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """With z the scaled logits and p = softmax(z): dlogprob/dz = onehot - p, dentropy/dz = -p (log p + entropy).
        The states' gradient covers only this rank's part of the vocabulary; the caller sums it over the group."""
        hidden, weight, targets, entropy, log_sums = ctx.saved_tensors
        words = weight[: ctx.num_words]
        grad_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden) if ctx.num_words else 0, ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            grad = project(hidden[rows], words, None, ctx.float32_head).div_(ctx.temperature)
            grad -= log_sums[rows, None]
            for part, block in blocks_of(grad, start):
                coefficient = grad_logprobs[part, None]
                if grad_entropy is not None:
                    coefficient = (block + entropy[part, None]).mul_(grad_entropy[part, None]).add_(coefficient)
                block.exp_().mul_(-coefficient)
                del block, coefficient
            mine, places = _own(targets[rows], ctx.num_words, ctx.group, weight)
            grad.scatter_add_(1, places[:, None], torch.where(mine, grad_logprobs[rows], 0.0)[:, None])
            grad = grad.div_(ctx.temperature).to(weight.dtype)
            torch.mm(grad, words, out=grad_hidden[rows])
            grad_weight[: ctx.num_words] += grad.T @ hidden[rows]
            del grad  # before the next chunk is made
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None, None


def _own(targets: Tensor, num_words: int, group: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(whether a target is in this rank's vocabulary rows, its index in them or 0)."""
    places = targets - dist.get_rank(group) * len(weight)
    mine = (places >= 0) & (places < num_words)
    return mine, places.masked_fill(~mine, 0)


def vocabulary_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    group: Any,
    entropy: bool,
    float32_head: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(log-probs, entropies or None) of softmax(logits / temperature), both float32 [N], in nats, differentiable and
    equal on all ranks of the group, which call it together.

    Args:
        hidden: [N, h], the states before the tokens to predict, equal on all ranks. Each rank's gradient covers its
            vocabulary rows, and must be summed over ranks.
        weight: [words, h], this rank's rows of the vocabulary matrix. Rows from vocab_size on are padding without
            probability.
        targets: int64 [N], the tokens to predict.
        float32_head: Sum and keep logits in float32 (hpcrl.engines.train.fsdp2.logits.Head).
    """
    num_words = min(max(vocab_size - dist.get_rank(group) * len(weight), 0), len(weight))
    logprobs, entropies = _VocabularyLogprobs.apply(
        hidden, weight, targets, num_words, temperature, chunk_tokens, float32_head, entropy, group
    )
    return logprobs, entropies if entropy else None
