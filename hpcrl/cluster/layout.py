"""The roles of each rank: a pure function of the configuration, checked before anything starts."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import MappingProxyType

from hpcrl.config import Config, ConfigError, Problem, RoleName
from hpcrl.config.checks import check_replicas
from hpcrl.config.roles import needed_roles
from hpcrl.spec.division import Division, DivisionError
from hpcrl.spec.tables import GEN_ENGINES, ROLES

CONTROLLER = 0
"""Rank of the controller."""

FROZEN_ROLES: tuple[RoleName, ...] = ("reference", "teacher")
"""Roles with a training engine for a frozen model; their ranks share the rows of a whole batch."""
ENGINE_ROLES: tuple[RoleName, ...] = ("trainer", *FROZEN_ROLES, "critic")
"""Roles with a training engine, whose ranks get the rows of batches."""


@dataclass(frozen=True)
class RoleLayout:
    """The ranks of each role, ascending; none for a role that the run does not need. Roles may share ranks."""

    ranks: Mapping[RoleName, tuple[int, ...]]
    world_size: int
    generator_tensor_parallel: int = 1
    divisions: Mapping[RoleName, Division] = field(default_factory=dict)
    scorers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Domain -> reward ranks that score only this domain (layout.reward.domains)."""

    @classmethod
    def from_config(cls, config: Config) -> RoleLayout:
        """The layout of a run. ConfigError lists every problem of the layout."""
        if problems := check_layout(config):
            raise ConfigError([problem.text for problem in problems])
        ranks, world_size = _assign(config)
        divisions = {
            name: ROLES[name].division(config, len(ranks[name])).of(ranks[name]) for name in needed_roles(config)
        }
        scorers = _scorers(config, ranks["reward"])
        return cls(MappingProxyType(ranks), world_size, config.layout.generator.tensor_parallel, divisions, scorers)

    def division(self, role: RoleName) -> Division:
        """The division of a role's work over its ranks."""
        ranks = self.ranks.get(role, ())
        return self.divisions.get(role) or Division.unsplit(len(ranks)).of(ranks)

    def scorers_of(self, domain: str) -> tuple[int, ...]:
        """The reward ranks that score a domain: its own, else the ranks without a domain."""
        return self.scorers.get(domain, self._shared_scorers)

    def domain_of(self, rank: int) -> str | None:
        """The only domain that a reward rank scores; None: all domains without their own ranks."""
        return next((domain for domain, ranks in self.scorers.items() if rank in ranks), None)

    def peers_of(self, role: RoleName, rank: int) -> tuple[int, ...]:
        """The ranks of a role that do the same work as this rank, including itself."""
        if role != "reward":
            return self.ranks[role]
        domain = self.domain_of(rank)
        return self._shared_scorers if domain is None else self.scorers[domain]

    @functools.cached_property
    def _shared_scorers(self) -> tuple[int, ...]:
        own = {rank for ranks in self.scorers.values() for rank in ranks}
        return tuple(rank for rank in self.ranks.get("reward", ()) if rank not in own)

    def roles_of(self, rank: int) -> tuple[RoleName, ...]:
        """The roles of a rank, controller first, then in the order of ROLES."""
        at = {role: bisect_left(ranks, rank) for role, ranks in self.ranks.items()}
        return tuple(role for role, ranks in self.ranks.items() if ranks[at[role] : at[role] + 1] == (rank,))

    @property
    def ranks_with_model(self) -> set[int]:
        """The ranks that hold a model or a part of a model."""
        return {rank for name, role in ROLES.items() if role.holds_model for rank in self.ranks.get(name, ())}

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each generator replica."""
        ranks, size = self.ranks["generator"], self.generator_tensor_parallel
        return tuple(ranks[i : i + size] for i in range(0, len(ranks), size))

    def replica_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of a generator rank's replica; the first one answers for all."""
        return next(replica for replica in self.replicas if rank in replica)

    @property
    def generates_on_trainers(self) -> bool:
        """Whether every generator rank is a trainer rank that yields all weights; then the trainers' own collectives
        bring new weights to the generators."""
        trainers = self.division("trainer")
        return len(trainers.weights) == 1 and set(self.ranks["generator"]) <= set(trainers.weights[0])

    @property
    def free_replicas(self) -> tuple[tuple[int, ...], ...]:
        """Replicas without controller ranks and ranks of a training engine: they also run during training, and the run
        survives their loss."""
        owners = [name for name, role in ROLES.items() if role.owns_default_group]
        busy = {CONTROLLER, *(rank for name in owners for rank in self.ranks.get(name, ()))}
        return tuple(replica for replica in self.replicas if busy.isdisjoint(replica))


def check_layout(config: Config) -> list[Problem]:
    """All problems of a run's layout."""
    needed = needed_roles(config)
    problems = [p for role in needed for p in _check_role(config, role, needed)]
    if not problems:
        ranks, world_size = _assign(config)
        problems += [p for role in needed for p in _check_ranks(config, role, ranks, world_size)]
        problems += _check_default_groups(config, ranks)
        problems += _check_engines_of_a_process(config, ranks)
        problems += [] if problems else _check_shared_rows(config, ranks)
    return problems


def _check_role(config: Config, role: RoleName, needed: tuple[RoleName, ...]) -> Iterator[Problem]:
    """Checks of one role that need no ranks."""
    spec, at = config.layout.of(role), ("layout", role)
    if spec.colocate_with is None:
        if spec.num_ranks is None:
            yield Problem(at, f"layout.{role}: has no ranks; give num_ranks or colocate_with")
    elif role in (chain := _chain(config, role)):
        loop = " -> ".join((role, *chain[: chain.index(role) + 1]))
        yield Problem((*at, "colocate_with"), f"layout.{role}.colocate_with: the roles share ranks in a cycle: {loop}")
    elif spec.colocate_with != "controller" and spec.colocate_with not in needed:
        text = f"layout.{role}.colocate_with: this run has no {spec.colocate_with}, so there are no ranks to share"
        yield Problem((*at, "colocate_with"), text)
    if spec.tensor_parallel > 1 and (reason := _whole(config, role)):
        text = f"layout.{role}.tensor_parallel: {spec.tensor_parallel}, but {reason}; use 1"
        yield Problem((*at, "tensor_parallel"), text, (("generator", "engine"),))


def _whole(config: Config, role: RoleName) -> str:
    """Why replicas of this role have one rank each; empty if they may have more."""
    spec, engine = ROLES[role], config.generator.engine
    if not spec.forms_replicas:
        return (
            f"the ranks of {role} are split by the keys of their engine"
            if spec.owns_default_group
            else f"each {role} rank holds a whole model"
            if spec.holds_model
            else (f"a {role} rank holds no model")
        )
    return "" if GEN_ENGINES[engine].tensor_parallel else f"the {engine} engine has no tensor parallelism"


def _check_ranks(
    config: Config, role: RoleName, ranks: Mapping[RoleName, tuple[int, ...]], world_size: int
) -> Iterator[Problem]:
    """Checks after every role has its ranks."""
    spec, at, mine = config.layout.of(role), ("layout", role), ranks[role]
    if (
        spec.colocate_with is not None
        and spec.num_ranks is not None
        and spec.num_ranks > len(ranks[spec.colocate_with])
    ):
        text = (
            f"layout.{role}.num_ranks: {spec.num_ranks} ranks of {spec.colocate_with} requested, "
            f"which has {len(ranks[spec.colocate_with])}"
        )
        yield Problem((*at, "num_ranks"), text, (("layout", spec.colocate_with, "num_ranks"),))
    if len(mine) % spec.tensor_parallel:
        text = f"layout.{role}.tensor_parallel: {spec.tensor_parallel} does not divide the {len(mine)} ranks of {role}"
        yield Problem((*at, "tensor_parallel"), text, ((*at, "num_ranks"),))
    if ROLES[role].forms_replicas:
        yield from check_replicas(config, len(mine) // spec.tensor_parallel)
    yield from _check_division(config, role, len(mine))
    if role == "reward":
        yield from _check_scorers(config, mine)
    if spec.min_ranks > len(mine):
        text = f"layout.{role}.min_ranks: {spec.min_ranks} is more than the {len(mine)} ranks of {role}"
        yield Problem((*at, "min_ranks"), text, ((*at, "num_ranks"),))
    if CONTROLLER in mine and world_size > 1:
        text = f"layout.{role}: shares rank 0 with the controller in a world of {world_size} ranks"
        yield Problem(at, f"{text}; only a world of one rank allows this (layout=single)")
    for other in _before(role) if ROLES[role].owns_default_group else ():
        theirs = ranks[other]
        if ROLES[other].owns_default_group and set(mine) & set(theirs) and mine != theirs:
            # Both engines own the default process group of their ranks, so they share all of these ranks or none.
            text = f"layout.{role}: ranks {_span(mine)} overlap with ranks {_span(theirs)} of {other}"
            yield Problem(at, f"{text}; give {role} all of these ranks, or separate ranks")


def _check_scorers(config: Config, ranks: tuple[int, ...]) -> Iterator[Problem]:
    """Checks of layout.reward.domains; whether every domain has ranks is only known with the rows."""
    spec, at = config.layout.reward, ("layout", "reward", "domains")
    total = sum(spec.domains.values())
    if total > len(ranks):
        counts = " + ".join(map(str, spec.domains.values()))
        text = f"layout.reward.domains: {counts} ranks of domains, and reward has {len(ranks)}"
        yield Problem(at, f"{text} (layout.reward.num_ranks)", (("layout", "reward", "num_ranks"),))
        return
    parts = spec.domains | ({"all others": len(ranks) - total} if spec.domains and total < len(ranks) else {})
    for domain, count in parts.items():
        if spec.min_ranks > count:
            text = f"layout.reward.min_ranks: {spec.min_ranks} is more than the {count} ranks of domain {domain}"
            yield Problem(("layout", "reward", "min_ranks"), text, (at,))


def _scorers(config: Config, ranks: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
    """The reward ranks of each domain that has its own, in order of the configuration."""
    ends = [*accumulate(config.layout.reward.domains.values(), initial=0)]
    parts = (ranks[start:end] for start, end in pairwise(ends)) if ranks else ()
    return MappingProxyType(dict(zip(config.layout.reward.domains, parts, strict=False)))


def _check_division(config: Config, role: RoleName, num_ranks: int) -> Iterator[Problem]:
    """Report a role whose engine cannot divide the work over its ranks, or has an inconsistent specification."""
    at, involved = ("layout", role), (("trainer", "engine"),)
    whose = f"trainer.engine={config.train_engine}" if ROLES[role].owns_default_group else "its specification"
    try:
        division = ROLES[role].division(config, num_ranks)
    except DivisionError as error:
        for problem in error.problems:
            yield Problem(problem.path, f"{problem.text} (layout.{role})", (*problem.involves, at))
    except Exception as error:  # the specification may come from an installed package
        text = f"layout.{role}: {whose}: {type(error).__name__}: {error}"
        yield Problem(at, text, involved)
    else:
        if division.ranks != tuple(range(num_ranks)):
            text = f"layout.{role}: {whose} divides ranks {_span(division.ranks)}"
            yield Problem(at, f"{text}, and {role} has {num_ranks}", involved)


def _check_default_groups(config: Config, ranks: Mapping[RoleName, tuple[int, ...]]) -> Iterator[Problem]:
    """Report replicas of which some but not all ranks belong to an engine that owns the default group."""
    for name, spec in ROLES.items():
        size = config.layout.of(name).tensor_parallel
        for first in range(0, len(ranks[name]), size) if spec.forms_replicas and size > 1 else ():
            replica = set(ranks[name][first : first + size])
            for other in (other for other, its in ROLES.items() if its.owns_default_group):
                shared = replica & set(ranks[other])
                if shared and shared != replica:
                    text = f"layout.{name}: ranks {_span(tuple(sorted(shared)))} of a replica are also {other} ranks"
                    yield Problem(
                        ("layout", name),
                        f"{text}, its other ranks are not; make all or none of each replica's ranks {other} ranks",
                        (("layout", other),),
                    )
                    return


def _check_engines_of_a_process(config: Config, ranks: Mapping[RoleName, tuple[int, ...]]) -> Iterator[Problem]:
    """Report a judge and a generator on one rank if a process can have only one engine of their kind."""
    shared, engine = set(ranks["judge"]) & set(ranks["generator"]), config.judge.engine
    if shared and engine == config.gen_engine and not GEN_ENGINES[engine].several_in_process:
        able = " or ".join(name for name, spec in GEN_ENGINES.items() if spec.several_in_process and spec.selectable)
        text = (
            f"judge.engine: rank {_span(tuple(sorted(shared)))} has a generator and a judge, and a process can have "
            f"only one {engine} engine; give the judge separate ranks (layout.judge.colocate_with=null "
            f"layout.judge.num_ranks=N), or judge.engine={able}"
        )
        yield Problem(("judge", "engine"), text, (("layout", "judge"), ("generator", "engine")))


def _check_shared_rows(config: Config, ranks: Mapping[RoleName, tuple[int, ...]]) -> Iterator[Problem]:
    """A critic or a teacher on another role's ranks gets that role's rows, so both engines must divide the ranks
    equally."""
    engines: dict[RoleName, str] = {"critic": config.critic_engine, "teacher": config.teacher_engine}
    for role, engine in engines.items():
        if not (mine := ranks[role]):
            continue
        groups = ROLES[role].division(config, len(mine)).groups
        for other in (other for other in ENGINE_ROLES if other != role and ranks[other] == mine):
            if ROLES[other].division(config, len(mine)).groups != groups:
                text = (
                    f"{role}.engine: {engine} divides {len(mine)} ranks into {len(groups)} group(s) with the same "
                    f"rows, and the {other} on these ranks divides them differently; give the {role} separate ranks: "
                    f"layout.{role}.colocate_with=null layout.{role}.num_ranks=N"
                )
                yield Problem((role, "engine"), text, (("layout", role), ("trainer",)))
                return


def _before(role: RoleName) -> list[RoleName]:
    names = list(ROLES)
    return names[: names.index(role)]


def _chain(config: Config, role: RoleName) -> list[RoleName]:
    """The roles reached from one role through colocate_with, up to the first repetition."""
    chain: list[RoleName] = []
    at = config.layout.of(role).colocate_with
    while at is not None and at not in chain:
        chain.append(at)
        at = None if at == "controller" else config.layout.of(at).colocate_with
    return chain


def _assign(config: Config) -> tuple[dict[RoleName, tuple[int, ...]], int]:
    """(role -> ranks, world size). Roles with their own ranks take consecutive ranks after the controller's."""
    needed, next_rank = needed_roles(config), CONTROLLER + 1
    ranks: dict[RoleName, tuple[int, ...]] = {"controller": (CONTROLLER,)}
    for role in ROLES:
        spec = config.layout.of(role)
        if role not in needed:
            ranks[role] = ()
        elif spec.colocate_with is None:
            count = spec.num_ranks or 0
            ranks[role] = tuple(range(next_rank, next_rank + count))
            next_rank += count
    while pending := [role for role in ROLES if role not in ranks]:
        for role in pending:
            spec = config.layout.of(role)
            if spec.colocate_with in ranks:
                ranks[role] = ranks[spec.colocate_with][: spec.num_ranks]
    return {role: ranks[role] for role in ("controller", *ROLES)}, next_rank


def _span(ranks: tuple[int, ...]) -> str:
    """Ranks as text: 1-4, 7."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
