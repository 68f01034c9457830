"""Bytes that a trainer rank sends to other trainer ranks in an optimizer step, by purpose and by collective.

They are those of NCCL's rings, of p ranks and a tensor of n bytes: n (p - 1) / p from each rank for an all-gather, a
reduce-scatter or an exchange of all with all (n: what all ranks have together, or what a rank has to exchange), and
twice as many for an all-reduce. Norms of gradients, counts and other collectives of a few numbers are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hpcrl.config import Config
from hpcrl.planner.batch import samples_of_an_update

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True)
class StepWork:
    """What a data parallel rank trains in an optimizer step: tokens of all its micro-batches, and how many of these."""

    num_tokens: int
    num_micro_batches: int

    @classmethod
    def of(cls, config: Config, num_data_parallel: int) -> StepWork:
        """If every sequence has the maximum length."""
        samples, longest = -(-samples_of_an_update(config) // num_data_parallel), config.max_row_tokens
        together = max(1, config.trainer.max_tokens_per_micro_batch // longest)
        return cls(samples * longest, -(-samples // together))


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in an optimizer step."""

    what: str
    collective: Collective
    num_bytes: int


def exchanged(what: str, collective: Collective, num_bytes: int, num_ranks: int) -> Iterator[Sent]:
    """What each of num_ranks ranks sends if they exchange num_bytes, as above; nothing if there is nothing to send."""
    times = 2 if collective == "all_reduce" else 1
    if sent := times * num_bytes * (num_ranks - 1) // num_ranks:
        yield Sent(what, collective, sent)


def total_bytes(sent: Iterable[Sent], gloo: bool = False) -> int:
    """The sum. gloo: with an all-reduce in place of every reduce-scatter, which gloo lacks."""
    return sum(each.num_bytes * (2 if gloo and each.collective == "reduce_scatter" else 1) for each in sent)
