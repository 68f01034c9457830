"""The ranks of each node: a pure function of the configuration, with equal results on the login node and in the job.

A component is a set of identical nodes; several components make a heterogeneous Slurm job. Ranks fill the nodes of
their component in order. The controller is an additional process on its component's first node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcrl.cluster.layout import CONTROLLER, RoleLayout
from hpcrl.config import ClusterConfig, ComponentConfig, Config, ConfigError, Problem
from hpcrl.config.cluster import memory_bytes

MAX_PER_NODE = 1024
"""Maximum ranks on a node without ranks_per_node."""


@dataclass(frozen=True)
class Component:
    """Identical nodes. `first_node` counts over all components; the ranks are consecutive."""

    name: str
    config: ComponentConfig
    first_node: int
    nodes: tuple[tuple[int, ...], ...]  # the ranks of each node


def cpus_of_node(component: Component, cluster: ClusterConfig) -> int:
    """CPUs that the job requests on each node of a component."""
    return component.config.cpus_per_node or cluster.threads_per_rank * max(map(len, component.nodes))


@dataclass(frozen=True)
class Placement:
    """All nodes of a run by component, in rank order."""

    components: tuple[Component, ...]

    @classmethod
    def from_config(cls, config: Config, layout: RoleLayout) -> Placement:
        """ConfigError if the components cannot hold the layout's ranks."""
        if problems := check_placement(config, layout):
            raise ConfigError([problem.text for problem in problems])
        components: list[Component] = []
        first = 0
        for name, spec, ranks in _shares(config, layout):
            size = spec.ranks_per_node or len(ranks)
            extra = ranks[:1] if ranks[0] == CONTROLLER and len(ranks) > 1 else ()
            own = ranks[len(extra) :]
            nodes = [tuple(own[i : i + size]) for i in range(0, len(own), size)]
            nodes[0] = (*extra, *nodes[0])
            components.append(Component(name, spec, first, tuple(nodes)))
            first += len(nodes)
        return cls(tuple(components))

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every node."""
        return tuple(node for component in self.components for node in component.nodes)


def check_placement(config: Config, layout: RoleLayout) -> list[Problem]:
    """Problems of a run's components: all problems of their roles; if there are none, all problems of their sizes."""
    return list(_check(config, layout)) or list(_check_sizes(config, layout))


def _check(config: Config, layout: RoleLayout) -> Iterator[Problem]:
    at = ("cluster", "components")
    places: dict[str, str] = {}
    for name, spec in config.cluster.components.items():
        for role in spec.roles:
            if role in places:
                yield Problem((*at, name, "roles"), f"cluster.components.{name}.roles: {role} is in {places[role]} too")
            places[role] = name
    for name, spec in config.cluster.components.items():
        if not any(layout.ranks.get(role) for role in spec.roles) and (places or len(config.cluster.components) > 1):
            what = f"no rank of this run has the role {' or '.join(spec.roles)}" if spec.roles else "empty"
            yield Problem((*at, name, "roles"), f"cluster.components.{name}.roles: {what}; remove the component")
    if not places:
        return
    homes: dict[int, str] = {}
    for role, ranks in layout.ranks.items():
        for rank in ranks:
            if (name := places.get(role) or homes.get(rank, "")) == "":
                text = f"cluster.components: no component has the role {role} of ranks {ranks[0]}-{ranks[-1]}"
                yield Problem(at, text)
                break
            if homes.setdefault(rank, name) != name:
                text = f"rank {rank} has this role and a role of component {homes[rank]}"
                yield Problem((*at, name, "roles"), f"cluster.components.{name}.roles: {role}: {text}")
                break
    order = [homes[rank] for rank in sorted(homes)]
    for name in dict.fromkeys(order):
        if name in order[order.index(name) + order.count(name) :]:
            text = (
                f"cluster.components.{name}.roles: its ranks are not consecutive; the layout gives ranks in the order "
            )
            yield Problem((*at, name, "roles"), text + ", ".join(layout.ranks))


def _check_sizes(config: Config, layout: RoleLayout) -> Iterator[Problem]:
    for name, spec, ranks in _shares(config, layout) if config.cluster.name == "slurm" else ():
        if spec.ranks_per_node is None and len(ranks) > MAX_PER_NODE:
            text = f"{len(ranks)} ranks are more than one node can hold; set cluster.components.{name}.ranks_per_node"
            yield Problem(("cluster", "components"), f"cluster.components: {text}", (("layout",),))
        size, gpus = spec.ranks_per_node or len(ranks), spec.gpus_per_node
        with_model = max(len(layout.ranks_with_model & {*ranks[i : i + size]}) for i in range(0, len(ranks), size))
        if 0 < gpus < with_model and config.cluster.device != "cpu" and config.debug != "fake":
            at, more = ("cluster", "components", name, "gpus_per_node"), "or set cluster.device=cpu"
            text = f"{gpus} for {with_model} ranks of a node that hold a model; request {with_model}, {more}"
            yield Problem(at, f"{'.'.join(at)}: {text}", (("cluster", "device"), ("layout",)))
        extra = ranks[0] == CONTROLLER and len(ranks) > 1
        processes = extra + min(size, len(ranks) - extra)
        yield from _check_limits(config.cluster, name, spec, processes)


def _check_limits(cluster: ClusterConfig, name: str, spec: ComponentConfig, processes: int) -> Iterator[Problem]:
    """Requests for a node that exceed cluster.node_limits. `processes`: ranks of the component's fullest node."""
    if spec.partition not in (None, cluster.partition):
        return
    at, limits = ("cluster", "components", name), cluster.node_limits
    keys = (("layout",), ("cluster", "node_limits"), ("cluster", "threads_per_rank"))
    if limits.gpus is not None and spec.gpus_per_node > limits.gpus:
        text = f"{spec.gpus_per_node}, but a node has {limits.gpus} (cluster.node_limits.gpus)"
        remedy = f"set it to {limits.gpus}, and ranks_per_node so that each rank with a model has a GPU"
        yield Problem((*at, "gpus_per_node"), f"{'.'.join(at)}.gpus_per_node: {text}; {remedy}", keys)
    cpus = spec.cpus_per_node or cluster.threads_per_rank * processes
    if limits.cpus is not None and cpus > limits.cpus:
        counted = "" if spec.cpus_per_node else f" ({processes} ranks x cluster.threads_per_rank)"
        text = f"{cpus}{counted}, but a job may request {limits.cpus} of a node (cluster.node_limits.cpus); lower it"
        yield Problem((*at, "cpus_per_node"), f"{'.'.join(at)}.cpus_per_node: {text}", keys)
    if limits.memory and spec.memory and memory_bytes(spec.memory) > memory_bytes(limits.memory):
        text = f"{spec.memory}, but a job may request {limits.memory} of a node (cluster.node_limits.memory); lower it"
        yield Problem((*at, "memory"), f"{'.'.join(at)}.memory: {text}", keys)


def _shares(config: Config, layout: RoleLayout) -> list[tuple[str, ComponentConfig, list[int]]]:
    """(component, its configuration, its ranks ascending) in rank order."""
    components = config.cluster.components or {"main": ComponentConfig()}
    places = {role: name for name, spec in components.items() for role in spec.roles}
    shares: dict[str, list[int]] = {}
    for rank in range(layout.world_size):
        name = next((places[role] for role in layout.roles_of(rank) if role in places), next(iter(components)))
        shares.setdefault(name, []).append(rank)
    return [(name, components[name], ranks) for name, ranks in shares.items()]
