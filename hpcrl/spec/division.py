"""How a training engine's ranks divide the work. This depends only on the configuration, so the login node, the plan,
rank 0 and every rank agree without communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from hpcrl.spec.problems import Problem

T = TypeVar("T")


class DivisionError(ValueError):
    """The ranks cannot be divided as configured; `problems` lists the causes."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        super().__init__("; ".join(problem.text for problem in problems))


@dataclass(frozen=True)
class Division:
    """Engines number their ranks from 0; RoleLayout.division() is the same division in ranks of the world."""

    groups: tuple[tuple[int, ...], ...]
    """The ranks of each data-parallel rank. They work on identical rows; the first rank (leader) gets the rows and
    broadcasts them, reports batch statistics, and writes stored rollouts. All groups have one size."""
    outputs: tuple[int, ...]
    """For each group, the rank with the model's outputs (log-probs, loss): in the last stage of a pipeline."""
    weights: tuple[tuple[int, ...], ...]
    """The shares of the parameters, which are sent to generators one after another: for each share, the ranks whose
    TrainEngine.named_weights() yields all of it. One share with all ranks if every rank yields all parameters."""

    @classmethod
    def unsplit(cls, num_ranks: int) -> Division:
        """Every rank is a data-parallel rank."""
        ranks = range(num_ranks)
        return cls(tuple((rank,) for rank in ranks), tuple(ranks), (tuple(ranks),))

    def __post_init__(self) -> None:
        """ValueError if an engine's division is inconsistent."""
        ranks = self.ranks
        if len({len(group) for group in self.groups}) > 1 or len(set(ranks)) < len(ranks):
            raise ValueError(f"the groups of a division are disjoint and of one size, not {self.groups}")
        places = zip(self.outputs, self.groups, strict=False)
        if len(self.outputs) != len(self.groups) or any(rank not in group for rank, group in places):
            raise ValueError(f"a division needs an output rank in each of {self.groups}, not {self.outputs}")
        owners = [rank for share in self.weights for rank in share]
        sound = all(self.weights) and set(owners).issubset(ranks) and len(set(owners)) == len(owners)
        if ranks and not (self.weights and sound):
            raise ValueError(f"each share of a division's weights needs ranks of its own, not {self.weights}")

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(rank for group in self.groups for rank in group))

    @property
    def is_split(self) -> bool:
        """Whether several ranks work on the same rows."""
        return len(self.groups[0]) > 1 if self.groups else False

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The leaders: the rank of each group that gets the rows."""
        return tuple(group[0] for group in self.groups)

    def of(self, ranks: Sequence[int]) -> Division:
        """The same division with ranks[i] in place of rank i."""
        groups, weights = (
            tuple(tuple(ranks[rank] for rank in some) for some in several) for several in (self.groups, self.weights)
        )
        return Division(groups, tuple(ranks[rank] for rank in self.outputs), weights)

    def replicate(self, by_leader: Mapping[int, T]) -> dict[int, T]:
        """The leaders' values, repeated for all ranks of their groups; ascending."""
        return dict(
            sorted((rank, by_leader[group[0]]) for group in self.groups for rank in group if group[0] in by_leader)
        )

    def data_parallel_peers(self, rank: int) -> tuple[int, ...]:
        """The ranks at this rank's index in every group; together they hold each row once."""
        place = next(group.index(rank) for group in self.groups if rank in group)
        return tuple(group[place] for group in self.groups)

    def group_of(self, rank: int) -> tuple[int, ...]:
        """All ranks of this rank's group."""
        return next(group for group in self.groups if rank in group)
