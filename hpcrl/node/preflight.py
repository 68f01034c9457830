"""Preflight: before the ranks start, every node of a job reports its properties, and the first node names unsuitable
nodes.

    python -m hpcrl.node.preflight RUN_DIR      the same by hand, on this machine or with srun on all nodes

The nodes communicate through files in the run folder, which all nodes must share: the first node writes a nonce and the
hash of config.yaml, the other nodes answer with a report that contains both, and the first node judges all reports and
writes a verdict. An unsuitable node does not justify a requeue, since Slurm would assign it again: the run ends and
names the node, which cluster.exclude avoids. Free space is read with statvfs; the first node also tries to reserve it
in the run folder for a moment, which detects a quota if the file system supports reservations."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import secrets
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from hpcrl.cluster import slurm
from hpcrl.cluster.layout import CONTROLLER, RoleLayout
from hpcrl.cluster.placement import Placement, cpus_of_node
from hpcrl.config import Config, RoleName
from hpcrl.config.abilities import chosen
from hpcrl.messaging.bootstrap import find_place
from hpcrl.messaging.network import NoInterfaceError, is_loopback, listen, own_network, unreachable
from hpcrl.node.devices import visible_gpus
from hpcrl.node.gpus import AskedToStopError, GpuNeeds, look
from hpcrl.node.host_memory import memory_limit
from hpcrl.planner.memory import host_bytes, planned_kinds
from hpcrl.run_folder import CONFIG, counted_image_tokens, stored_config
from hpcrl.spec.extras import install, version_of
from hpcrl.spec.tables import ROLES
from hpcrl.system import log
from hpcrl.system.cli import in_shell
from hpcrl.system.clock import AwakeClock
from hpcrl.system.exit_codes import SIGNAL_CODES, ExitCode
from hpcrl.system.files import allow_files, backed_off_s, find_room, write_durably

logger = logging.getLogger("hpcrl.node.preflight")  # not __name__: a program, too

CACHED_S = 10.0
"""How long a node waits for the first node's files; network file systems may cache reads until a folder is listed."""
FOLDER = "preflight"
CANARY, VERDICT = "canary.json", "verdict.json"
PACKAGES = ("hpcrl", "torch", "transformers")
FILES_OF_A_PROCESS, FILES_OF_A_PEER = 64, 8
"""Open files of a rank that communicates with N others: in worlds of 5 and of 9 ranks the controller, with four sockets
per rank, has 17 + 4 N, and a trainer with 2 and 6 generators has 31 and 55. The rest is room for groups between more
roles. Pairs connect at their first communication."""
RUN_FREE_BYTES, SCRATCH_FREE_BYTES = 1 << 30, 64 << 20
"""Minimum free space of the run folder, for checkpoints, and of the node's scratch folder, for files of sandboxes."""

STALE = (
    "reads another config.yaml than the first node: its file system caches an older one, or run_dir is not on a file "
    "system that all nodes share; wait a minute and submit again"
)

T = TypeVar("T")


class Canary(msgspec.Struct, forbid_unknown_fields=True):
    """Written by the first node; every node must see it. `config` is the hash of config.yaml; `port` is the first
    node's port at `address`, 0 if it does not listen."""

    nonce: str
    config: str = ""
    address: str = ""
    port: int = 0


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """A node's report.

    Args:
        scratch_free_bytes: Free bytes of the scratch folder; -1 if it is not writable.
        no_network: Error of the node's network interface.
        unreached: Why the node cannot connect to the first node.
        no_room: Why RUN_FREE_BYTES cannot be written.
        bad_gpus: Why the node's ranks cannot compute on its GPUs.
        gpu_note: A note on the node's GPUs.
    """

    nonce: str
    node: int
    name: str
    ranks: list[int]
    versions: dict[str, str]
    gpus: int
    open_files: int
    run_free_bytes: int
    scratch: str
    scratch_free_bytes: int
    cpus: int = 0
    machine_cpus: int = 0
    config: str = ""
    host: str = ""
    address: str = ""
    no_network: str = ""
    unreached: str = ""
    no_room: str = ""
    memory_bytes: int = 0
    bad_gpus: str = ""
    gpu_note: str = ""


class Judgement(msgspec.Struct, forbid_unknown_fields=True):
    """The first node's verdict on all reports: all agents' exit code, and one line; with code 0, only remarks."""

    code: int
    message: str


@dataclass(frozen=True)
class Needs:
    """A run's requirements on a node.

    Args:
        all_or_none: The node must have at least this many GPUs, or none.
        all_or_none_roles: Roles whose nodes must all make the same choice.
        modules: The engines' modules, with the extras that install them.
        gpu_modules: Modules needed only on nodes with GPUs, with the way to install them.
        tested_versions: Prefix of each module's tested versions.
        required_versions: Prefix of each module's supported versions.
        gpu: Requirements for the GPUs.
    """

    ranks: tuple[int, ...]
    gpus: int
    open_files: int
    cpus: int
    interface: str | None = None
    all_or_none: int = 0
    all_or_none_roles: tuple[RoleName, ...] = ()
    memory_bytes: int = 0
    modules: Mapping[str, str] = field(default_factory=dict)
    gpu_modules: Mapping[str, str] = field(default_factory=dict)
    tested_versions: Mapping[str, str] = field(default_factory=dict)
    required_versions: Mapping[str, str] = field(default_factory=dict)
    gpu: GpuNeeds = field(default_factory=GpuNeeds)

    @property
    def names(self) -> tuple[str, ...]:
        """Packages that must have the same version on all nodes that need them."""
        return ("python", *PACKAGES, *self.modules)


NOTHING = Needs((), 0, 0, 0)


class Rendezvous(NamedTuple):
    """What a node found at the rendezvous, for its report."""

    nonce: str = ""
    config: str = ""
    unreached: str = ""


ALONE = Rendezvous()


def preflight(
    config: Config, run_dir: Path, meeting: Path, node: int, num_nodes: int, signals: Sequence[int] = ()
) -> Judgement:
    """Report this node; returns the verdict on all nodes, within 2 x timeouts.start_s. All nodes' agents call it.
    `meeting` is the folder for the files, the same on all nodes and unused by earlier starts. `signals` receives this
    process's stop signals, which batch systems send to all nodes. The code is DEADLINE if a node did not report,
    BAD_INPUT if one is unsuitable, a signal's code, or 0. Only node 0 and a node that sees no other have a message."""
    try:
        judgement = _rendezvous(config, run_dir, meeting, node, num_nodes, signals)
    except AskedToStopError:
        judgement = Judgement(ExitCode.DONE, "")
    if judgement.code == ExitCode.DONE and signals:
        judgement = stopped(signals, node)
    if node == 0:
        _write(meeting / VERDICT, judgement)
    return judgement


def stopped(signals: Sequence[int], node: int) -> Judgement:
    """Verdict for a signal that arrived before the ranks were started; only node 0 has a message."""
    name = signal.Signals(signals[0])
    text = f"ended by {name.name} before the ranks were started"
    return Judgement(SIGNAL_CODES.get(name, ExitCode.REQUEUE), text if node == 0 else "")


def _rendezvous(
    config: Config, run_dir: Path, meeting: Path, node: int, num_nodes: int, signals: Sequence[int]
) -> Judgement:
    meeting.mkdir(parents=True, exist_ok=True)
    start_s = config.timeouts.start_s
    with contextlib.ExitStack() as stack:
        if node == 0:
            at = ("", 0)
            if num_nodes > 1:
                with contextlib.suppress(NoInterfaceError):  # included in its report
                    listener = stack.enter_context(listen(own_network(config.cluster.network_interface).address))
                    at = listener.getsockname()[:2]
            _write(meeting / CANARY, Canary(secrets.token_hex(16), _hash(run_dir), *at))
        canary = _await(lambda: _read(meeting / CANARY, Canary), start_s, signals)
        if canary is None:
            text = f"node {node_name()} found no {meeting / CANARY} within {start_s:g} s: the first node hangs, or"
            return Judgement(ExitCode.DEADLINE, f"{text} {run_dir} is not on a file system that all nodes share")
        # This node may have read an older file from its network file system's cache.
        same = _await(lambda: _hash(run_dir) == canary.config or None, min(CACHED_S, start_s / 2), signals)
        needs = needs_of(stored_config(run_dir), counted_image_tokens(run_dir)) if same else [NOTHING] * num_nodes
        if num_nodes != len(needs):
            text = f"the step runs on {num_nodes} node(s), the layout places its ranks on {len(needs)}"
            return Judgement(ExitCode.BAD_INPUT, text if node == 0 else "")
        said = Rendezvous(canary.nonce, _hash(run_dir), unreachable(canary.address, canary.port) if canary.port else "")
        _write(meeting / _report_name(node), examine(node, needs[node], run_dir, said, signals))
        if node == 0:
            return _judge_all(needs, meeting, canary, start_s, run_dir, signals)
    # The first node waits start_s for all.
    judged = _await(lambda: _read(meeting / VERDICT, Judgement), start_s + 1.0, signals)
    if judged is None:
        return Judgement(ExitCode.DEADLINE, f"node {node_name()}: no verdict from the first node within {start_s:g} s")
    return Judgement(judged.code, "")


def _hash(run_dir: Path) -> str:
    """Hash of config.yaml as this node sees it."""
    with contextlib.suppress(OSError):
        os.listdir(run_dir)  # makes a network file system revalidate its cache
        return hashlib.sha256((run_dir / CONFIG).read_bytes()).hexdigest()
    return ""


def needs_of(config: Config, image_tokens: int | None = None) -> list[Needs]:
    """Requirements of each node of a run, in the order of nodes. `image_tokens` are a row's at most, None if they were
    not counted."""
    layout = RoleLayout.from_config(config)
    cuda = config.cluster.device == "cuda"
    auto, with_model = config.cluster.device == "auto", layout.ranks_with_model
    kinds = planned_kinds(config, layout, image_tokens)
    modules = {module: extra for _, _, spec in chosen(config) for module, extra in spec.needs.items()}
    on_gpu = {module: way for _, _, spec in chosen(config) for module, way in spec.needs_on_gpu.items()}
    tested = {module: versions for _, _, spec in chosen(config) for module, versions in spec.tested_versions.items()}
    required_versions = {
        module: versions for _, _, spec in chosen(config) for module, versions in spec.required_versions.items()
    }
    peers = {roles: _peers(layout, roles) for roles in {layout.roles_of(rank) for rank in range(layout.world_size)}}
    return [
        Needs(
            ranks,
            max(component.config.gpus_per_node, cuda * len(with_model & {*ranks})),
            FILES_OF_A_PROCESS + FILES_OF_A_PEER * max(peers[layout.roles_of(rank)] for rank in ranks),
            cpus_of_node(component, config.cluster),
            config.cluster.network_interface,
            auto * len(with_model & {*ranks}),
            tuple(
                name for name, role in ROLES.items() if auto and role.holds_model and {*layout.ranks[name]} & {*ranks}
            ),
            0 if config.cluster.oversubscribe else host_bytes(kinds, [rank for rank in ranks if rank in with_model]),
            modules if with_model & {*ranks} else {},
            on_gpu if with_model & {*ranks} and config.cluster.device != "cpu" else {},
            tested if with_model & {*ranks} else {},
            required_versions if with_model & {*ranks} else {},
            GpuNeeds.of(config, layout, ranks, component.config.gpus_per_node),
        )
        for component in Placement.from_config(config, layout).components
        for ranks in component.nodes
    ]


def _peers(layout: RoleLayout, roles: Sequence[RoleName]) -> int:
    """Number of ranks with which a rank of these roles communicates, including the rank itself if it is one of them."""
    if "controller" in roles:
        return layout.world_size
    return len({CONTROLLER, *(rank for role in roles for peer in ROLES[role].peers for rank in layout.ranks[peer])})


def examine(node: int, needs: Needs, run_dir: Path, said: Rendezvous = ALONE, signals: Sequence[int] = ()) -> Report:
    """This machine's report; raises its limit on open files, which ranks inherit. AskedToStopError after a signal."""
    found = look(needs.gpu, os.environ, signals, _say)
    gpus = len(visible_gpus(os.environ))
    run_free, no_room = find_room(run_dir, RUN_FREE_BYTES, reserve=node == 0)
    scratch = os.environ.get("TMPDIR", "/tmp")
    address = no_network = ""
    try:
        address = own_network(needs.interface).address
    except NoInterfaceError as error:
        no_network = str(error)
    return Report(
        nonce=said.nonce,
        node=node,
        name=node_name(),
        ranks=list(needs.ranks),
        versions={"python": platform.python_version()}
        | {name: version_of(name) for name in (*PACKAGES, *needs.modules, *needs.gpu_modules)},
        gpus=gpus,
        open_files=allow_files(),
        run_free_bytes=run_free,
        scratch=scratch,
        scratch_free_bytes=shutil.disk_usage(scratch).free if os.access(scratch, os.W_OK) else -1,
        cpus=len(os.sched_getaffinity(0)),
        machine_cpus=len(os.sched_getaffinity(1)),  # limit of the node's first process, which may be a container's
        config=said.config,
        host=platform.node(),
        address=address,
        no_network=no_network,
        unreached=said.unreached,
        no_room=no_room,
        memory_bytes=memory_limit()[0],
        bad_gpus=found.problem,
        gpu_note=found.note,
    )


def _say(text: str) -> None:
    """Log a line about this node; lost if the log's disk is full."""
    with contextlib.suppress(OSError):
        logger.warning("node %s %s", node_name(), text)


def judge(reports: Sequence[Report], needs: Sequence[Needs]) -> str:
    """Problems of the nodes, in one line that names them; empty if there are none. needs[i] is for reports[i]."""
    found: dict[str, list[str]] = {}
    versions: dict[str, list[str]] = {}
    for report, need in zip(reports, needs, strict=True):
        for name in need.names:
            versions.setdefault(name, []).append(report.versions.get(name, ""))
    usual = {name: _most(values) for name, values in versions.items()}
    hosts = {report.host for report in reports}
    for report, need in zip(reports, needs, strict=True):
        stale = [STALE] if report.config != reports[0].config else []
        for text in stale or [*_complaints(report, need, usual), *_unconnected(report, need, len(hosts))]:
            found.setdefault(text, []).append(report.name)
    for role, counts in _mixed_roles(reports, needs).items():
        shown = ", ".join(f"{_nodes(names)}: {count}" for count, names in counts.items() if count)
        text = f"shows no GPU, but other nodes with {role} ranks do ({shown}): add it to cluster.exclude, or set "
        found.setdefault(f"{text}cluster.device=cpu", []).extend(counts[0])
    return "; ".join(f"{_each(names)} {text}" for text, names in found.items())


def remark(reports: Sequence[Report], needs: Sequence[Needs]) -> str:
    """One line on engine versions not tested with hpcrl, and on GPUs, or "". They are no reason to stop."""
    found: dict[str, list[str]] = {}
    for report, need in zip(reports, needs, strict=True):
        for module, tested in need.tested_versions.items():
            if (version := report.versions.get(module)) and not version.startswith(tested):
                found[f"{module} {version} is installed on the nodes, but hpcrl is written for {tested}*"] = []
        if report.gpu_note:
            found.setdefault(report.gpu_note, []).append(report.name)
    return "; ".join(f"{_each(names)} {text}" if names else text for text, names in found.items())


def _mixed_roles(reports: Sequence[Report], needs: Sequence[Needs]) -> dict[RoleName, dict[int, list[str]]]:
    """Nodes by role and number of GPUs, for roles that would run partly on GPUs and partly on CPUs. Of several roles on
    the same nodes, only the first is listed."""
    counts: dict[RoleName, dict[int, list[str]]] = {}
    for report, need in zip(reports, needs, strict=True):
        for role in need.all_or_none_roles if report.gpus >= need.gpus else ():
            counts.setdefault(role, {}).setdefault(report.gpus, []).append(report.name)
    mixed: dict[RoleName, dict[int, list[str]]] = {}
    for role, nodes in counts.items():
        if 0 in nodes and len(nodes) > 1 and nodes not in mixed.values():
            mixed[role] = nodes
    return mixed


def read_reports(world: Path) -> list[Report]:
    """The reports of the newest preflight in a world's folder, by node; empty without a preflight."""
    newest = _newest_meeting(world)
    paths = sorted(newest.glob("node_*.json")) if newest is not None else []
    return [report for path in paths if (report := _read(path, Report)) is not None]


def read_judgement(world: Path) -> Judgement | None:
    """Verdict of the newest preflight in a world's folder; None without one or while it runs."""
    newest = _newest_meeting(world)
    return _read(newest / VERDICT, Judgement) if newest is not None else None


def rendezvous_folder(world: Path) -> Path:
    """Folder for this start's files, named after the Slurm step, so it has no files of earlier starts."""
    job, step = slurm.own_job(os.environ), os.environ.get("SLURM_STEP_ID")
    assert job is not None and step is not None, "in a Slurm step"
    return world / FOLDER / f"{job[0]}.{job[1]}.{step}"


def node_name() -> str:
    """This node's name in the batch system, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def see_run(run_dir: Path) -> str:
    """A message for the user if this node does not see the run folder, else empty. Retries for a while in a Slurm step:
    the batch script has just written the folder on another node."""
    seconds = CACHED_S if "SLURM_STEP_ID" in os.environ else 0.0
    if _await(lambda: _hash(run_dir) or None, seconds, ()):
        return ""
    return f"node {node_name()} sees no {run_dir / CONFIG}: put run_dir on a file system that all nodes share"


def _complaints(report: Report, need: Needs, usual: Mapping[str, str]) -> list[str]:
    """One node's problems, with the same text for the same problem on several nodes."""
    found = [
        f"has {name} {report.versions.get(name) or '(none)'}, but other nodes have {version or 'none'}: use one "
        "environment on all nodes"
        for name, version in usual.items()
        if name in need.names and report.versions.get(name, "") != version
    ]
    found += [
        f"has no {module}, which the run needs; install it there: {install([extra])}"
        for module, extra in need.modules.items()
        if not report.versions.get(module)
    ]
    found += [
        f"has GPUs but no {module}, which the run needs on GPUs; install it there: {way}"
        for module, way in need.gpu_modules.items()
        if report.gpus and not report.versions.get(module)
    ]
    found += [
        f"has {module} {report.versions[module]}, but hpcrl's part for it is written for {known}*; install that there: "
        f"{install([need.modules.get(module, module)])}"
        for module, known in need.required_versions.items()
        if report.versions.get(module) and not report.versions[module].startswith(known)
    ]
    if report.bad_gpus:
        found.append(report.bad_gpus)
    elif report.gpus < need.gpus:
        found.append(f"shows {report.gpus} GPU(s) of the {need.gpus} that the run requests: add it to cluster.exclude")
    elif 0 < report.gpus < need.all_or_none:
        text = f"shows {report.gpus} GPU(s) for its {need.all_or_none} ranks that hold a model"
        found.append(f"{text}: give it fewer ranks, or set cluster.device=cpu")
    if report.cpus < (cpus := min(need.cpus, report.machine_cpus)):
        found.append(
            f"lets the step use {report.cpus} CPU(s) of the {cpus} that the job requests: srun --cpu-bind=none"
        )
    if 0 < report.memory_bytes < need.memory_bytes:
        text = f"gives the job {_mib(report.memory_bytes)} of memory, but its ranks' plan needs "
        found.append(f"{text}{_mib(need.memory_bytes)}: raise the memory key of its component")
    if report.open_files < need.open_files:
        text = f"allows {report.open_files} open files, but the run needs {need.open_files}"
        found.append(f"{text}: raise the hard limit there (ulimit -Hn)")
    if report.run_free_bytes < RUN_FREE_BYTES:
        found.append(f"has {_mib(report.run_free_bytes)} free in the run folder, but needs {_mib(RUN_FREE_BYTES)}")
    elif report.no_room:
        text = f"may not write {_mib(RUN_FREE_BYTES)} to the run folder: {report.no_room}"
        found.append(f"{text}; free some of your quota (quota -s, lfs quota) or set run_dir")
    if report.scratch_free_bytes < 0:
        found.append(f"cannot write to its scratch {report.scratch}: set TMPDIR or add it to cluster.exclude")
    elif report.scratch_free_bytes < SCRATCH_FREE_BYTES:
        free, least = _mib(report.scratch_free_bytes), _mib(SCRATCH_FREE_BYTES)
        found.append(
            f"has {free} free in its scratch {report.scratch}, but needs {least}: set TMPDIR or add it to "
            "cluster.exclude"
        )
    return found


def _unconnected(report: Report, need: Needs, num_hosts: int) -> Iterator[str]:
    """Why other nodes cannot reach this node, or this node cannot reach them."""
    if report.no_network and (need.interface is not None or num_hosts > 1):
        yield f"{report.no_network}: cluster.network_interface"
    elif report.unreached:
        yield f"cannot connect to the first node at {report.unreached}: name another cluster.network_interface"
    elif num_hosts > 1 and is_loopback(report.address):
        text = "which no other node can reach: set cluster.network_interface to an interface with another address"
        yield f"has the address {report.address}, {text}"


def _judge_all(
    needs: Sequence[Needs], meeting: Path, canary: Canary, start_s: float, run_dir: Path, signals: Sequence[int]
) -> Judgement:
    """Wait for all reports and judge them. Called on node 0."""
    reports: dict[int, Report] = {}

    def complete() -> bool | None:
        there = set(os.listdir(meeting))  # one request instead of one per file
        for node in range(len(needs)):
            name = _report_name(node)
            if node not in reports and name in there and (report := _read(meeting / name, Report)) is not None:
                assert report.nonce == canary.nonce, f"{meeting / name} answers another start"
                reports[node] = report
        return True if len(reports) == len(needs) else None

    if _await(complete, start_s, signals) is None:
        missing = [node for node in range(len(needs)) if node not in reports]
        names = _step_hosts()
        late = [names[node] if len(names) == len(needs) else str(node) for node in missing]
        why = f"it hangs, or {run_dir} is not on a file system that all nodes share"
        return Judgement(ExitCode.DEADLINE, f"{_nodes(late)} did not report within {start_s:g} s: {why}")
    ordered = [reports[node] for node in range(len(needs))]
    if message := judge(ordered, needs):
        return Judgement(ExitCode.BAD_INPUT, message)
    return Judgement(ExitCode.DONE, remark(ordered, needs))


def _step_hosts() -> list[str]:
    """Names of the step's nodes in order, if Slurm gives them."""
    num = int(os.environ.get("SLURM_HET_SIZE", "0"))
    lists = [os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", "") for i in range(num)]
    try:
        text = [slurm.call("scontrol", "show", "hostnames", nodes) for nodes in lists or [_own_nodes()] if nodes]
    except slurm.SlurmError:
        return []
    return " ".join(text).split()


def _own_nodes() -> str:
    return os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")


def _newest_meeting(world: Path) -> Path | None:
    meetings = (world / FOLDER).iterdir() if (world / FOLDER).is_dir() else ()
    return max(meetings, key=lambda meeting: meeting.stat().st_mtime, default=None)


def _await(look: Callable[[], T | None], seconds: float, signals: Sequence[int]) -> T | None:
    """The first result of `look` that is not None; None after `seconds`. AskedToStopError after a signal."""
    clock = AwakeClock(seconds)
    while (found := look()) is None and (waited_s := clock.now()) < seconds:
        if signals:
            raise AskedToStopError
        time.sleep(backed_off_s(waited_s))
    return found


def _read(path: Path, kind: type[T]) -> T | None:
    """The object in a file, None without a file. msgspec.ValidationError if the object has another type."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def _write(path: Path, value: msgspec.Struct) -> None:
    write_durably(path, msgspec.json.encode(value))


def _report_name(node: int) -> str:
    return f"node_{node:05d}.json"


def _most(values: Sequence[str]) -> str:
    return Counter(values).most_common(1)[0][0]


def _each(names: Sequence[str]) -> str:
    """The nodes, before a predicate in the singular."""
    return f"each of the {_nodes(names)}" if len(names) > 1 else _nodes(names)


def _nodes(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"node{'s' if len(names) > 1 else ''} {shown}"


def _mib(size: int) -> str:
    return f"{size >> 20:,} MiB"


def main(argv: Sequence[str]) -> int:
    """Command line."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(in_shell(__doc__))
        return ExitCode.DONE if list(argv) in (["-h"], ["--help"]) else ExitCode.BAD_INPUT
    run_dir = Path(argv[0])
    if unseen := see_run(run_dir):
        print(f"hpcrl: {unseen}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    config = stored_config(run_dir)
    place = find_place(os.environ, RoleLayout.from_config(config).world_size)
    if place.launcher != "slurm":
        needs = needs_of(config, counted_image_tokens(run_dir))[:1]
        reports = [examine(0, needs[0], run_dir)]
        message = judge(reports, needs)
        judgement = Judgement(ExitCode.BAD_INPUT if message else ExitCode.DONE, message)
    else:
        world = run_dir / "world"
        judgement = preflight(config, run_dir, rendezvous_folder(world), place.node, place.num_nodes)
        reports = read_reports(world) if place.node == 0 else []
    if judgement.message:
        print(f"hpcrl: {judgement.message}", file=sys.stderr)
    for report in reports if judgement.code == ExitCode.DONE else []:
        free = f"{_mib(report.run_free_bytes)} free in the run folder, {_mib(report.scratch_free_bytes)} in scratch"
        print(f"{report.name}  ranks {report.ranks}  {report.gpus} GPU(s)  {report.open_files} open files  {free}")
    return judgement.code


if __name__ == "__main__":
    log.start("agent", console="stderr")
    sys.exit(main(sys.argv[1:]))
