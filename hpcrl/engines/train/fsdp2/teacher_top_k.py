"""A teacher's most probable words at each token, in chunks of the vocabulary projection."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.engines.train.fsdp2.logits import Head, scaled_logits
from hpcrl.engines.train.fsdp2.vocabulary import VocabularyPart


def check_top_k(k: int, vocab_size: int) -> None:
    """ValueError unless the vocabulary has k words."""
    if not 1 <= k <= vocab_size:
        raise ValueError(f"teacher: top_k={k} of a vocabulary of {vocab_size} words; take 1 to {vocab_size}")


@torch.no_grad()
def teacher_top_k(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    *,
    head: Head,
    temperature: float,
    chunk_tokens: int,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor]:
    """(words int32 [N, k], log-probs float32 [N, k]) of softmax(logits / temperature), descending; equal on all ranks
    of the part's group, which call it together.

    Args:
        hidden: [N, h], the states before the tokens.
        weight: [rows, h], the vocabulary projection, of this rank's words.
        bias: [rows].
        chunk_tokens: At most chunk_tokens x V logits exist at once.
        part: This rank's words; None: the matrix has all.
    """
    part = part or VocabularyPart(0, len(weight), len(weight))
    ids = torch.empty(len(hidden), k, dtype=torch.int32, device=hidden.device)
    logprobs = torch.empty(len(hidden), k, device=hidden.device)
    words, biases = weight[: part.count], None if bias is None else bias[: part.count]
    for start in range(0, len(hidden), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        logits = scaled_logits(hidden[chunk], words, biases, head, temperature)
        best, places = logits.topk(min(k, part.count))
        best, places = _merged(best, places + part.first, k, part)
        ids[chunk] = places.int()
        logprobs[chunk] = best - part.log_sums([logits])[0, :, None]
        del logits  # before the next chunk is made
    return ids, logprobs


def _merged(best: Tensor, words: Tensor, k: int, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """The k best of all ranks' best logits, [n, k'] with k' <= k, and their words."""
    if part.group is None or part.group.size() == 1:
        return best, words
    lacking = (0, k - best.shape[1])
    best = torch.nn.functional.pad(best, lacking, value=-torch.inf).contiguous()
    words = torch.nn.functional.pad(words, lacking).contiguous()
    of_ranks = [[torch.empty_like(some) for _ in range(part.group.size())] for some in (best, words)]
    dist.all_gather(of_ranks[0], best, group=part.group)
    dist.all_gather(of_ranks[1], words, group=part.group)
    best, order = torch.cat(of_ranks[0], 1).topk(k)
    return best, torch.cat(of_ranks[1], 1).gather(1, order)
