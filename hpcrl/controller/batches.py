"""The controller's view of a batch (ids and sizes per rank, never tokens), and the division into commands."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hpcrl.cluster.layout import FROZEN_ROLES, RoleLayout
from hpcrl.config import Config
from hpcrl.controller.balance import balance, micro_batches
from hpcrl.messaging.messages import Move
from hpcrl.rollout.preferences import Preference
from hpcrl.rollout.types import Sizes, split_sample_id

PAIRS = -3
"""Id of the batch of a step's pairs."""


@dataclass
class BatchHandle:
    """A batch that is distributed over ranks.

    Args:
        mini_batches: Samples of each mini-batch, over all ranks.
        rows: Trainer rank -> its samples, ascending, in the order of the rank's rows; for each data-parallel group
            (hpcrl.spec.division) only the first rank is listed.
        rows_by_role: The same mapping for each role on ranks other than the trainer's.
        prompts: Sample -> its prompt, if group members share one.
        keep_together: Samples with the same number are always in one micro-batch (preference pairs).
        weights: Sample -> its weight in the loss, if not 1.
        coefficients: Numbers of this batch that the objective reads besides the algorithm's coefficients.
        domains: Name -> its prompts.
        teacher_prompts: Prompt -> the token ids that the teacher reads in its place; empty without teacher.context.
        preferences: Pairs of the samples to train on, if the pipeline trains on pairs; the two of a pair are on one
            rank.
    """

    id: int
    step: int
    sizes: Mapping[int, Sizes]
    mini_batches: Sequence[Sequence[int]]
    rows: dict[int, list[int]]
    rows_by_role: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    prompts: Mapping[int, int] = field(default_factory=dict)
    keep_together: Mapping[int, int] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)
    domains: dict[str, list[int]] = field(default_factory=dict)
    teacher_prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    preferences: Sequence[Preference] = ()

    @property
    def samples(self) -> list[int]:
        """All sample ids, ascending."""
        return sorted(self.sizes)

    def rows_of(self, role: str) -> dict[int, list[int]]:
        """A role's samples per rank."""
        return self.rows_by_role.get(role, self.rows)

    @property
    def all_rows(self) -> dict[int, list[int]]:
        """Samples per rank, for all roles."""
        return {rank: samples for rows in (self.rows, *self.rows_by_role.values()) for rank, samples in rows.items()}

    def plan(
        self, rows: Mapping[int, list[int]], samples: Sequence[int], max_tokens: int
    ) -> dict[int, list[list[int]]]:
        """Row indices per rank and micro-batch for these samples; every rank gets the same number of micro-batches."""
        chosen = set(samples)
        ranks = sorted(rows)
        indices = [[i for i, sample in enumerate(rows[rank]) if sample in chosen] for rank in ranks]
        parts = [[rows[rank][i] for i in part] for rank, part in zip(ranks, indices, strict=True)]
        lengths = [[self.sizes[sample].total for sample in part] for part in parts]
        prompts = [[self.prompts.get(sample, sample) for sample in part] for part in parts]
        together = [[self.keep_together.get(sample) for sample in part] for part in parts]
        plans = micro_batches(lengths, max_tokens, prompts, together)
        return {
            rank: [[part[i] for i in micro] for micro in plan]
            for rank, part, plan in zip(ranks, indices, plans, strict=True)
        }

    def norms(self, samples: Sequence[int]) -> tuple[float, float]:
        """(model tokens, sequences with model tokens) over all ranks, weighted by the samples' weights."""
        counts = [(self.sizes[sample].model, self.weights.get(sample, 1.0)) for sample in samples]
        tokens, sequences = sum(n * weight for n, weight in counts), sum(weight for n, weight in counts if n > 0)
        return float(tokens), float(sequences)


def lay_out(
    config: Config,
    layout: RoleLayout,
    step: int,
    sizes: Mapping[int, Sizes],
    preferences: Sequence[Preference] = (),
) -> BatchHandle:
    """Assign a step's samples to mini-batches and data-parallel ranks, only by their ids and sizes. With `preferences`,
    every rank gets a share of the pairs, and one of the other samples."""
    parts = split_mini_batches(sorted(sizes), config.algorithm.num_mini_batches)
    together = {sample: number for number, pair in enumerate(preferences) for sample in (pair.better, pair.worse)}
    if preferences:
        parts = [sorted(together), sorted(sizes.keys() - together.keys())]
    trainers, prompts = layout.division("trainer").leaders, {sample: split_sample_id(sample)[0] for sample in sizes}
    shares = assign_rows(sizes, parts, trainers, prompts, together)
    handle = BatchHandle(step, step, sizes, parts, shares, prompts=prompts, preferences=preferences)
    # The critic trains by mini-batch and gets a share of each; frozen models judge the whole batch, or only the pairs.
    whole = parts if preferences else [sorted(sizes)]
    for role, pieces in (("critic", parts), *((role, whole) for role in FROZEN_ROLES)):
        if (leaders := layout.division(role).leaders) and leaders != trainers:
            same = next((rows for rows in handle.rows_by_role.values() if set(rows) == set(leaders)), None)
            handle.rows_by_role[role] = same or assign_rows(sizes, pieces, leaders, prompts, together)
    return handle


def pairs_of(batch: BatchHandle) -> BatchHandle:
    """The pairs of a batch, as a batch on the same ranks: on each rank the samples of a pair are adjacent, the better
    one first."""
    order = [sample for pair in batch.preferences for sample in (pair.better, pair.worse)]
    place = {sample: number for number, sample in enumerate(order)}

    def ordered(rows: Mapping[int, list[int]]) -> dict[int, list[int]]:
        return {rank: sorted(place.keys() & set(samples), key=place.__getitem__) for rank, samples in rows.items()}

    return BatchHandle(
        PAIRS,
        batch.step,
        {sample: batch.sizes[sample] for sample in order},
        [order],
        ordered(batch.rows),
        {role: ordered(rows) for role, rows in batch.rows_by_role.items()},
        prompts={sample: batch.prompts[sample] for sample in order},
        keep_together={sample: number // 2 for sample, number in place.items()},
        preferences=batch.preferences,
    )


def split_mini_batches(samples: Sequence[int], count: int) -> list[list[int]]:
    """Divide samples, ordered by prompt, into `count` mini-batches, each with a few group members of every prompt.
    Mini-batches of whole groups would share more prompts, but the policy learnt less from the same rollouts, since an
    optimizer step then has fewer prompts (docs/measured.md)."""
    return [list(samples[i::count]) for i in range(count)]


def assign_rows(
    sizes: Mapping[int, Sizes],
    parts: Sequence[Sequence[int]],
    ranks: Sequence[int],
    prompts: Mapping[int, int] | None = None,
    keep_together: Mapping[int, int] | None = None,
) -> dict[int, list[int]]:
    """Samples per rank, ascending: each part (mini-batch) is balanced over the ranks by its own lengths. Samples with
    equal numbers in `keep_together` are always on one rank; samples with equal numbers in `prompts` are if possible."""
    rows: dict[int, list[int]] = {rank: [] for rank in ranks}
    for part in parts:
        groups = None if prompts is None else [prompts[sample] for sample in part]
        together = None if keep_together is None else [keep_together.get(sample) for sample in part]
        shares = balance([sizes[sample].total for sample in part], len(ranks), groups, together)
        for rank, share in zip(ranks, shares, strict=True):
            rows[rank].extend(part[i] for i in share)
    return {rank: sorted(samples) for rank, samples in rows.items()}


def moves(
    homes: Mapping[int, int],
    rows: Mapping[int, Sequence[int]],
    sizes: Mapping[int, Sizes],
    readers: Collection[int] = (),
) -> list[Move]:
    """One Move per pair of ranks, from the samples' ranks (homes) to their destinations (rows); includes the samples'
    messages if the destination is in `readers`."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for dest, samples in rows.items():
        for sample in samples:
            pairs.setdefault((homes[sample], dest), []).append(sample)
    return [
        Move(
            source,
            dest,
            samples,
            [sizes[sample].total for sample in samples],
            [sizes[sample].text for sample in samples] if dest in readers else [],
        )
        for (source, dest), samples in sorted(pairs.items())
    ]
