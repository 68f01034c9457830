"""Checks that this machine can run a local run: cores, GPUs, and installed engines."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, Problem
from hpcrl.config.abilities import chosen
from hpcrl.node.devices import VISIBLE, amd_names, bind_gpus, visible_gpus
from hpcrl.node.gpus import GpuNeeds, unusable
from hpcrl.spec.problems import dotted

MAX_PER_CPU = 64
"""Maximum threads and processes of a run per core; more would exhaust memory or process ids before training."""


def check_machine(config: Config, layout: RoleLayout) -> Iterator[Problem]:
    """Refuses a local run that this machine cannot run."""
    if excess := _excess(config, layout):
        text = f"cluster: {excess}; request fewer, or set cluster.oversubscribe=true"
        yield Problem(("cluster",), text, (("layout",), ("reward",), ("env",)))
    yield from _lacking(config)
    yield from _unusable(config, layout)


def machine_notes(config: Config, layout: RoleLayout) -> Iterator[str]:
    """The same problems as notes of a plan, which may be for another machine."""
    if excess := _excess(config, layout):
        yield f"note: this machine refuses a start: {excess}"
    for problem in (*_lacking(config), *_unusable(config, layout)):
        yield f"note: this machine refuses a start: {problem.text}"


def _lacking(config: Config) -> Iterator[Problem]:
    """Refuses engines of a local run that are not installed for this machine's GPUs."""
    if config.cluster.name != "local" or config.cluster.device == "cpu" or not visible_gpus(os.environ):
        return
    for path, name, spec in chosen(config):
        if lacking := spec.missing_on_gpu():
            text = f"{dotted(path)}: {name} is not fully installed; {lacking}; or set cluster.device=cpu"
            yield Problem(path, text, (("cluster", "device"),))


def _unusable(config: Config, layout: RoleLayout) -> Iterator[Problem]:
    """Refuses a local run that cannot use this machine's GPUs, or has more ranks with a model than there are GPUs."""
    if config.cluster.name != "local":
        return
    ranks, device = range(layout.world_size), config.cluster.device
    if why := unusable(GpuNeeds.of(config, layout, ranks), os.environ):
        yield Problem(("cluster", "device"), f"cluster.device: this machine {why}")
        return
    try:
        bind_gpus(ranks, sorted(layout.ranks_with_model), visible_gpus(os.environ), device)
    except ValueError as error:
        yield Problem(("cluster", "device"), str(error), (("layout",),))


def _excess(config: Config, layout: RoleLayout) -> str:
    """Threads and processes of a local run, if they exceed this machine's limit; else empty."""
    cluster, cpus = config.cluster, len(os.sched_getaffinity(0))
    if cluster.name != "local" or cluster.oversubscribe:
        return ""
    parts = {
        f"{layout.world_size} ranks x {cluster.threads_per_rank} threads": layout.world_size * cluster.threads_per_rank
    }
    for domain, reward in config.reward.items():
        ranks = len(layout.scorers_of(domain))
        parts[f"{ranks} reward ranks x {reward.num_processes} processes of {domain}"] = ranks * reward.num_processes
    for domain, env in config.envs.items():
        ranks = len(layout.ranks["env"])
        parts[f"{ranks} env ranks x {env.num_threads or 1} threads of {domain}"] = ranks * (env.num_threads or 1)
    count, limit = sum(parts.values()), MAX_PER_CPU * cpus
    if count <= limit:
        return ""
    return f"{' + '.join(parts)} = {count:,} on this machine of {cpus} core(s), whose limit is {limit}"


def device_row(config: Config, layout: RoleLayout) -> str:
    """The device of models, as text."""
    device, ranks = config.cluster.device, len(layout.ranks_with_model)
    if device != "auto":
        return f"{device} (cluster.device)"
    if config.cluster.name == "slurm":
        return "auto: GPUs on nodes with a GPU for each rank with a model, the CPU on nodes without GPUs"
    gpus = len(visible_gpus(os.environ))
    if gpus:
        return f"auto: {ranks} of {gpus} GPU(s){f', {names}' if (names := amd_names()) else ''}"
    hidden = VISIBLE in os.environ
    return f"auto: the CPU, since {f'{VISIBLE} names no GPU' if hidden else 'this machine has no GPU'}"
