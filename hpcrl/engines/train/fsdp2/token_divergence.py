"""The divergence of a student from its teacher at each token, in chunks of the vocabulary projection.

Full logits [tokens, vocabulary] of neither model exist at any time. Over the whole vocabulary, one chunk of each
exists: the teacher's logits are recomputed from its final states and its head. Over the teacher's top-k, one chunk of
the student's. The backward pass recomputes each chunk and overwrites it with its gradient, one block of rows at a time.

With q the student's and p the teacher's probabilities, and z the student's scaled logits, every divergence D below has
a gradient of the form dD/dz = q (h - sum(q h)):

- beta 0: D = sum p (log p - log q), dD/dz = q - p.
- beta 1: D = sum q (log q - log p), dD/dz = q (log q - log p - D).
- between: m = beta p + (1 - beta) q, D = beta sum p (log p - log m) + (1 - beta) sum q (log q - log m),
  dD/dz = (1 - beta) q (log q - log m - sum q (log q - log m)).

In the form top_k, a further class holds all words that are not among the k. The student's probability of this class is
the sum of theirs, so it has the same formulas, and its gradient is distributed over its words by their share of q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hpcrl.algorithms.interface import TeacherHead
from hpcrl.engines.train.fsdp2.logits import Head, blocks_of, scaled_logits
from hpcrl.engines.train.fsdp2.taught import Taught, TaughtStates, TaughtTopK
from hpcrl.engines.train.fsdp2.vocabulary import VocabularyPart

NOTHING = -1e4
"""The log-prob, for both models, of a class that neither has; its exponential is 0, and all its terms are finite."""
LEAST_REST = 2.0**-24
"""The teacher's least probability of the words that are not among its k. Log-probs in float32 tell no less."""

COPIES = 4
"""Tensors of a block's size that the formulas need besides the block."""


def divergences(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(D, what the gradient needs of the whole row), both float32 [n], as sums over the given words: sums over parts of
    the vocabulary add up. log_q, log_p: float32 [n, V]."""
    if beta == 0.0:
        value = (log_p.exp() * (log_p - log_q)).sum(-1)
        return value, torch.zeros_like(value)
    q = log_q.exp()
    if beta == 1.0:
        value = q.mul_(log_q - log_p).sum(-1)
        return value, value
    log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
    of_student = q.mul_(log_q - log_m).sum(-1)
    of_teacher = log_m.neg_().add_(log_p).mul_(log_p.exp()).sum(-1)
    return beta * of_teacher + (1 - beta) * of_student, of_student


def slopes(log_q: Tensor, log_p: Tensor, row: Tensor, beta: float) -> Tensor:
    """dD/dz, float32 [n, V], of the scaled logits z; `row` [n, 1] as from divergences(), over all words."""
    q = log_q.exp()
    if beta == 0.0:
        return q.sub_(log_p.exp())
    if beta == 1.0:
        return q.mul_((log_q - log_p).sub_(row))
    log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
    return q.mul_(log_m.neg_().add_(log_q).sub_(row)).mul_(1 - beta)


@dataclass(frozen=True)
class _Options:
    head: Head
    beta: float
    temperature: float
    chunk_tokens: int
    part: VocabularyPart

    @property
    def factor(self) -> float:
        """The slope of scaled logits by logits, without softcap."""
        return self.head.scale / self.temperature

    def student(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The student's scaled logits [n, count]."""
        count = self.part.count
        return scaled_logits(
            hidden, weight[:count], None if bias is None else bias[:count], self.head, self.temperature
        )

    def bend(self, block: Tensor) -> Tensor | None:
        """The softcap's slope at these scaled logits; None without one."""
        cap = self.head.softcap
        return None if cap is None else 1 - (block / (self.factor * cap)).square_()

    def finish(self, block: Tensor, grad: Tensor, bend: Tensor | None) -> None:
        """From dD/dz to the loss's gradient by the logits, in place."""
        block.mul_(grad[:, None] * self.factor)
        if bend is not None:
            block.mul_(bend)


class _Gradients:
    """Sums of a backward pass over chunks."""

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, count: int):
        self.hidden, self.weight, self.count = hidden, weight, count
        self.of_hidden = torch.zeros_like(hidden)
        self.of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        self.of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

    def add(self, chunk: slice, grad: Tensor) -> None:
        """Add the gradient by a chunk's logits, float32 [n, count]."""
        if not self.count:
            return
        if self.of_bias is not None:
            self.of_bias[: self.count] += grad.sum(0)
        grad = grad.to(self.weight.dtype)
        torch.mm(grad, self.weight[: self.count], out=self.of_hidden[chunk])
        if self.of_weight is not None:
            self.of_weight[: self.count] += grad.T @ self.hidden[chunk]

    def result(self, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        of_weight = None if self.of_weight is None else self.of_weight.to(self.weight.dtype)
        return self.of_hidden, of_weight, None if self.of_bias is None or bias is None else self.of_bias.to(bias.dtype)


class _OverVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, taught: TaughtStates, options: _Options
    ) -> Tensor:
        values = hidden.new_empty(len(hidden), dtype=torch.float32)
        rows_of_all, log_sums = torch.empty_like(values), values.new_empty(2, len(hidden))
        for start in range(0, len(hidden), options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            logits = options.student(hidden[chunk], weight, bias), _teacher_logits(taught, chunk, options)
            log_sums[:, chunk] = options.part.log_sums(logits)
            sums = logits[0].new_zeros(2, len(logits[0]))
            for (rows, log_q), (_, log_p) in _blocks(logits, options):
                here = slice(start + rows.start, start + rows.stop)
                log_q -= log_sums[0, here, None]
                log_p -= log_sums[1, here, None]
                sums[0, rows], sums[1, rows] = divergences(log_q, log_p, options.beta)
                del log_q, log_p
            values[chunk], rows_of_all[chunk] = options.part.sum(sums)
            del logits  # before the next chunk is made
        ctx.save_for_backward(hidden, weight, bias, rows_of_all, log_sums)
        ctx.taught, ctx.options = taught, options
        return values

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, weight, bias, rows_of_all, log_sums = ctx.saved_tensors
        taught, options = ctx.taught, ctx.options
        found = _Gradients(ctx, hidden, weight, bias, options.part.count)
        for start in range(0, len(hidden), options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            logits = options.student(hidden[chunk], weight, bias), _teacher_logits(taught, chunk, options)
            for (rows, block), (_, log_p) in _blocks(logits, options):
                here = slice(start + rows.start, start + rows.stop)
                bend = options.bend(block)
                block -= log_sums[0, here, None]
                log_p -= log_sums[1, here, None]
                block.copy_(slopes(block, log_p, rows_of_all[here, None], options.beta))
                options.finish(block, grad_values[here], bend)
                del block, log_p, bend
            grad = logits[0]
            del logits
            found.add(chunk, grad)
            del grad  # before the next chunk is made
        return *found.result(bias), None, None


def _blocks(logits: tuple[Tensor, Tensor], options: _Options) -> Any:
    """Blocks of the student's and of the teacher's rows; none on a rank without words."""
    return zip(*(blocks_of(some, 0, COPIES) for some in logits), strict=True) if options.part.count else ()


def _teacher_logits(taught: TaughtStates, chunk: slice, options: _Options) -> Tensor:
    """The teacher's scaled logits of the words of this rank's part, float32 [n, count]; with several teachers, each
    token's teacher's."""
    states = taught.states[chunk]
    if taught.teachers is None:
        return _logits_of(taught.head, states, options)
    numbers = taught.teachers[chunk]
    found = states.new_empty(len(states), options.part.count, dtype=torch.float32)
    for number, head in enumerate((taught.head, *taught.further)):
        tokens = (numbers == number).nonzero()[:, 0]
        if len(tokens):
            found[tokens] = _logits_of(head, states[tokens, : head.weight.shape[1]], options)
    return found


def _logits_of(head: TeacherHead, states: Tensor, options: _Options) -> Tensor:
    words = slice(options.part.first, options.part.first + options.part.count)
    bias = None if head.bias is None else head.bias[words]
    own = Head(head.softcap, head.scale, options.head.float32)
    return scaled_logits(states.to(head.weight.dtype), head.weight[words], bias, own, options.temperature)


class _OverTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, taught: TaughtTopK, options: _Options
    ) -> Tensor:
        values = hidden.new_empty(len(hidden), dtype=torch.float32)
        log_rests = torch.empty_like(values)
        by_class = values.new_empty(len(hidden), taught.ids.shape[1] + 1)
        part = options.part
        for start in range(0, len(hidden), options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            logits, ids = options.student(hidden[chunk], weight, bias), taught.ids[chunk]
            mine, places = part.places(ids)
            chosen = logits.new_zeros(ids.shape)
            if part.count:
                chosen = torch.where(mine, logits.gather(1, places), 0.0)
                _leave_out(logits, mine, places)
            known = ids < part.total
            chosen = part.sum(chosen).masked_fill_(~known, -torch.inf)
            log_rest = part.log_sums([logits])[0]
            log_q = torch.cat([chosen, log_rest[:, None]], 1)
            log_q -= log_q.logsumexp(-1, keepdim=True)
            absent = log_q.isneginf()
            log_p = _teacher_classes(taught.logprobs[chunk], known).masked_fill_(absent, NOTHING)
            log_q.masked_fill_(absent, NOTHING)
            values[chunk], row = divergences(log_q, log_p, options.beta)
            by_class[chunk] = slopes(log_q, log_p, row[:, None], options.beta)
            log_rests[chunk] = log_rest.clamp_(min=torch.finfo(torch.float32).min)
            del logits  # before the next chunk is made
        ctx.save_for_backward(hidden, weight, bias, by_class, log_rests)
        ctx.ids, ctx.options = taught.ids, options
        return values

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, weight, bias, by_class, log_rests = ctx.saved_tensors
        options: _Options = ctx.options
        found = _Gradients(ctx, hidden, weight, bias, options.part.count)
        for start in range(0, len(hidden) if options.part.count else 0, options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            grad = options.student(hidden[chunk], weight, bias)
            for rows, block in blocks_of(grad, start):
                bend = options.bend(block)
                mine, places = options.part.places(ctx.ids[rows])
                _leave_out(block, mine, places)
                block.sub_(log_rests[rows, None]).exp_().mul_(by_class[rows, -1:])
                block.scatter_add_(1, places, torch.where(mine, by_class[rows, :-1], 0.0))
                options.finish(block, grad_values[rows], bend)
                del block, bend
            found.add(chunk, grad)
            del grad  # before the next chunk is made
        return *found.result(bias), None, None


def _leave_out(logits: Tensor, mine: Tensor, places: Tensor) -> None:
    """Set logits of these words to -inf, in place. Adding 0 for words of other ranks needs no wait for their number."""
    logits.scatter_add_(1, places, torch.zeros_like(places, dtype=logits.dtype).masked_fill_(mine, -torch.inf))


def _teacher_classes(logprobs: Tensor, known: Tensor) -> Tensor:
    """float32 [n, k + 1]: the teacher's log-probs of its k words and of all others, without words that the student does
    not know. In float64, in which 1 - sum p keeps the digits of a small rest."""
    logprobs = logprobs.double()
    unknown = logprobs.exp().masked_fill_(known, 0.0).sum(-1, keepdim=True).clamp_(max=1 - LEAST_REST)
    logprobs -= torch.log1p(-unknown)
    rest = 1 - logprobs.exp().masked_fill_(~known, 0.0).sum(-1, keepdim=True)
    return torch.cat([logprobs, rest.clamp_(min=LEAST_REST).log_()], 1).float()


def token_divergence(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    taught: Taught,
    *,
    head: Head,
    chunk_tokens: int,
    part: VocabularyPart | None = None,
) -> Tensor:
    """float32 [N], nats: the divergence (hpcrl.spec.divergence) of softmax(student's logits / temperature) from the
    teacher's, differentiable by hidden, weight and bias; equal on all ranks of the part's group, which call it
    together.

    Over the whole vocabulary, only words count that both models have, the first min(V, V of the teacher), of several
    teachers the smallest: both softmaxes are over these. Among the teacher's k words, those that the student lacks are
    left out of the teacher's softmax.

    Args:
        hidden: [N, h], the student's states before the tokens, equal on all ranks. Each rank's gradient covers its
            words, and must be summed over ranks.
        weight: [rows, h], the student's vocabulary projection, of this rank's words.
        bias: [rows].
        chunk_tokens: At most chunk_tokens x V logits of each model exist at once in either pass.
        part: This rank's words; None: the matrix has all.
    """
    part = part or VocabularyPart(0, len(weight), len(weight))
    asked = taught.divergence
    options = _Options(head, asked.beta, asked.temperature, chunk_tokens, part)
    if isinstance(taught, TaughtTopK):
        return _OverTopK.apply(hidden, weight, bias, taught, options)  # type: ignore[no-any-return]
    common = replace(options, part=part.up_to(taught.num_words))
    return _OverVocabulary.apply(hidden, weight, bias, taught, common)  # type: ignore[no-any-return]
