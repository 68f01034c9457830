"""Which rank plays which role: a pure function of the configuration, checked before anything starts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hpcrl.config import Config, ConfigError, Problem, RoleName
from hpcrl.config.checks import check_replicas

CONTROLLER = 0
"""Rank of the controller."""

ROLES: tuple[RoleName, ...] = ("trainer", "generator", "reference", "reward", "env")
"""The roles besides the controller, in the order in which they take ranks."""


@dataclass(frozen=True)
class RoleLayout:
    """Role -> ranks, ascending. A role that the run does not need has none. Roles may share ranks."""

    ranks: Mapping[RoleName, tuple[int, ...]]
    world_size: int
    generator_tensor_parallel: int = 1

    @classmethod
    def from_config(cls, config: Config) -> RoleLayout:
        """The layout of a run. ConfigError holds everything that is impossible about it."""
        if problems := check_layout(config):
            raise ConfigError([problem.text for problem in problems])
        ranks, world_size = _assign(config)
        return cls(MappingProxyType(ranks), world_size, config.layout.generator.tensor_parallel)

    def roles_of(self, rank: int) -> tuple[RoleName, ...]:
        """The roles of a rank, controller first, then in the order of ROLES."""
        at = {role: bisect_left(ranks, rank) for role, ranks in self.ranks.items()}
        return tuple(role for role, ranks in self.ranks.items() if ranks[at[role] : at[role] + 1] == (rank,))

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Generator ranks in groups of one replica each."""
        ranks, size = self.ranks["generator"], self.generator_tensor_parallel
        return tuple(ranks[i : i + size] for i in range(0, len(ranks), size))

    @property
    def free_replicas(self) -> tuple[tuple[int, ...], ...]:
        """Those whose ranks neither control nor train nor are the reference: they go on while others do, and may be
        lost."""
        busy = {CONTROLLER, *self.ranks["trainer"], *self.ranks["reference"]}
        return tuple(replica for replica in self.replicas if busy.isdisjoint(replica))


def needed_roles(config: Config) -> tuple[RoleName, ...]:
    """The roles, besides the controller, that the run needs."""
    reinforces = config.reinforces
    needed: dict[RoleName, bool] = {
        "trainer": True,
        "generator": config.generates or config.evaluates,
        "reference": reinforces and config.learns and config.algorithm.uses_reference,
        "reward": config.generates or config.evaluates,
        "env": reinforces and (config.generates or config.evaluates) and config.env is not None,
    }
    return tuple(role for role in ROLES if needed[role])


def check_layout(config: Config) -> list[Problem]:
    """Everything that is impossible about the ranks of a run."""
    needed = needed_roles(config)
    problems = [p for role in needed for p in _check_role(config, role, needed)]
    if not problems:
        ranks, world_size = _assign(config)
        problems += [p for role in needed for p in _check_ranks(config, role, ranks, world_size)]
    return problems


def _check_role(config: Config, role: RoleName, needed: tuple[RoleName, ...]) -> Iterator[Problem]:
    """What can be said of one role without knowing any rank."""
    spec, at = getattr(config.layout, role), ("layout", role)
    if spec.colocate_with is None:
        if spec.num_ranks is None:
            yield Problem(at, f"layout.{role}: has no ranks; give num_ranks or colocate_with")
    elif role in (chain := _chain(config, role)):
        loop = " -> ".join((role, *chain[: chain.index(role) + 1]))
        yield Problem((*at, "colocate_with"), f"layout.{role}.colocate_with: the roles share ranks in a circle: {loop}")
    elif spec.colocate_with != "controller" and spec.colocate_with not in needed:
        text = f"layout.{role}.colocate_with: this run has no {spec.colocate_with}, so there are no ranks to share"
        yield Problem((*at, "colocate_with"), text)
    engine = config.generator.engine
    if spec.tensor_parallel > 1 and role == "generator" and engine == "native":
        text = f"layout.{role}.tensor_parallel: {spec.tensor_parallel}, but the native engine has no tensor parallelism"
        yield Problem((*at, "tensor_parallel"), text + "; use 1", (("generator", "engine"),))
    elif spec.tensor_parallel > 1 and role in ("trainer", "reference"):
        text = f"layout.{role}.tensor_parallel: {spec.tensor_parallel}, but trainers are split by trainer.megatron"
        yield Problem((*at, "tensor_parallel"), text + "; use 1")
    elif spec.tensor_parallel > 1 and role != "generator":
        text = f"layout.{role}.tensor_parallel: {spec.tensor_parallel}, but a {role} rank holds no model; use 1"
        yield Problem((*at, "tensor_parallel"), text)


def _check_ranks(
    config: Config, role: RoleName, ranks: Mapping[RoleName, tuple[int, ...]], world_size: int
) -> Iterator[Problem]:
    """What can be said once every role has its ranks."""
    spec, at, mine = getattr(config.layout, role), ("layout", role), ranks[role]
    if (
        spec.colocate_with is not None
        and spec.num_ranks is not None
        and spec.num_ranks > len(ranks[spec.colocate_with])
    ):
        text = (
            f"layout.{role}.num_ranks: {spec.num_ranks} ranks of {spec.colocate_with} asked for, "
            f"which has {len(ranks[spec.colocate_with])}"
        )
        yield Problem((*at, "num_ranks"), text, (("layout", spec.colocate_with, "num_ranks"),))
    if len(mine) % spec.tensor_parallel:
        text = f"layout.{role}.tensor_parallel: {spec.tensor_parallel} does not divide the {len(mine)} ranks of {role}"
        yield Problem((*at, "tensor_parallel"), text, ((*at, "num_ranks"),))
    if role == "generator":
        yield from check_replicas(config, len(mine) // spec.tensor_parallel)
    if spec.min_ranks > len(mine):
        text = f"layout.{role}.min_ranks: {spec.min_ranks} is more than the {len(mine)} ranks of {role}"
        yield Problem((*at, "min_ranks"), text, ((*at, "num_ranks"),))
    if CONTROLLER in mine and world_size > 1:
        text = f"layout.{role}: shares rank 0 with the controller in a world of {world_size} ranks"
        yield Problem(at, f"{text}; only a world of one rank does (layout=single)")
    trainers = ranks["trainer"]
    if role == "reference" and set(mine) & set(trainers) and mine != trainers:
        # Both engines own the default process group of their ranks, so they share all of it or nothing.
        text = f"layout.reference: ranks {_span(mine)} overlap with ranks {_span(trainers)} of trainer"
        yield Problem(at, f"{text}; let reference take all of them or ranks of its own")


def _chain(config: Config, role: RoleName) -> list[RoleName]:
    """The roles that are reached from one by colocate_with, up to the first repetition."""
    chain: list[RoleName] = []
    at = getattr(config.layout, role).colocate_with
    while at is not None and at not in chain:
        chain.append(at)
        at = None if at == "controller" else getattr(config.layout, at).colocate_with
    return chain


def _assign(config: Config) -> tuple[dict[RoleName, tuple[int, ...]], int]:
    """(role -> ranks, world size). Roles of their own take consecutive ranks after the controller's."""
    needed, next_rank = needed_roles(config), CONTROLLER + 1
    ranks: dict[RoleName, tuple[int, ...]] = {"controller": (CONTROLLER,)}
    for role in ROLES:
        spec = getattr(config.layout, role)
        if role not in needed:
            ranks[role] = ()
        elif spec.colocate_with is None:
            ranks[role] = tuple(range(next_rank, next_rank + spec.num_ranks))
            next_rank += spec.num_ranks
    while pending := [role for role in ROLES if role not in ranks]:
        for role in pending:
            spec = getattr(config.layout, role)
            if spec.colocate_with in ranks:
                ranks[role] = ranks[spec.colocate_with][: spec.num_ranks]
    return {role: ranks[role] for role in ("controller", *ROLES)}, next_rank


def _span(ranks: tuple[int, ...]) -> str:
    """Ranks for people: 1-4, 7."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
