"""The resources of a run as text: nodes, memory of each rank and cards that fit, hours, checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Component, Placement
from hpcrl.config import Config, Problem
from hpcrl.config.cluster import memory_bytes
from hpcrl.metrics.duration import duration
from hpcrl.models.shape import CannotPlanError, ModelShape
from hpcrl.node.host_memory import memory_limit
from hpcrl.planner.advice import advise
from hpcrl.planner.generator import update_traffic
from hpcrl.planner.memory import CARDS, RESERVE, USUAL_CARD, RankMemory, excess, host_bytes, memory, sends_over_nccl
from hpcrl.planner.memory_parts import Part, Phase, PlanRow
from hpcrl.planner.storage import whole_checkpoint_bytes
from hpcrl.planner.traffic import StepWork, total_bytes, weight_groups
from hpcrl.planner.trainer import train_plan

PHASE_WORDS: dict[Phase, str] = {
    "train": "forward and backward",
    "update": "the optimizer step",
    "reference": "reference log-probs",
    "teacher": "the teacher's pass",
    "critic": "the critic's forward and backward",
    "critic_update": "the critic's optimizer step",
    "generate": "generation",
    "publish": "the weight transfer",
}


def node_rows(config: Config, layout: RoleLayout) -> Iterator[PlanRow]:
    """Role -> component -> nodes -> ranks, and the cost of a job that runs to its time limit."""
    components = Placement.from_config(config, layout).components
    hours = config.cluster.time_s / 3600
    node_hours, gpu_hours = 0.0, 0.0
    for number, component in enumerate(components):
        ranks = [rank for node in component.nodes for rank in node]
        roles = dict.fromkeys(role for rank in ranks for role in layout.roles_of(rank))
        gpus, count = component.config.gpus_per_node, len(component.nodes)
        node_hours, gpu_hours = node_hours + count * hours, gpu_hours + count * gpus * hours
        yield (
            "" if number else "nodes",
            f"{component.name}: {', '.join(roles)}; {count} node(s) with {gpus} GPU(s), ranks {ranks[0]}-{ranks[-1]}, "
            f"{_number(count * hours)} node-hours",
        )
    requested = any(component.config.gpus_per_node for component in components)
    if requested and config.cluster.device == "cpu":
        yield "", "note: cluster.device=cpu leaves the GPU(s) of the job idle; set cluster.device=auto"
    if not requested and config.cluster.device == "cuda":
        yield "", "note: cluster.device=cuda, but the job requests no GPU: set gpus_per_node of a component"
    limit = duration(config.cluster.time_s)
    yield "cost", f"at most {_number(node_hours)} node-hours, {_number(gpu_hours)} GPU-hours ({limit} a job)"
    if config.cluster.name == "local":
        yield "", "note: nodes and cost are for a Slurm job; without +cluster=slurm all ranks run on this machine"


def trainer_rows(config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[PlanRow]:
    """How the training engine splits model and batch; nothing for an engine without a plan."""
    with contextlib.suppress(CannotPlanError):
        yield from train_plan(config).rows(config, layout, shape)


def memory_rows(config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[PlanRow]:
    """Memory of every kind of rank by part, the cards that fit, and changes to fit smaller cards."""
    try:
        kinds = memory(config, layout, shape)
    except CannotPlanError as error:
        yield "memory", f"cannot be planned: {error}"
        return
    for number, kind in enumerate(kinds):
        phase, peak = kind.peak(on_host=not kind.on_gpu, least=True)
        text = f"rank {_span(kind.ranks)} ({', '.join(kind.roles)}): {size(peak)} at most, in {PHASE_WORDS[phase]}"
        yield "" if number else "memory", text + _cards(kind)
        yield from (("", f"  {line}") for line in _parts(kind, phase))
        if kind.offloads:
            yield "", "  trainer and generator take turns: memory is freed between phases (layout.offload)"
        if kind.on_gpu and kind.generator_share < 1:
            others = f"beside {size(kind.beside_generator)} of other roles" if kind.beside_generator else "alone"
            yield "", f"  the generator starts {others}, with {kind.generator_share:.0%} of the card"
        on_host = kind.peak(on_host=True)
        if kind.on_gpu and on_host[1]:
            always = all(kind.total(phase, on_host=True) in (0, on_host[1]) for phase in PHASE_WORDS)
            when = "" if always else f", in {PHASE_WORDS[on_host[0]]}"
            yield "", f"  in host memory {size(on_host[1])} at most{when}"
    yield from _host_rows(config, layout, kinds)
    gpu_kinds = [kind for kind in kinds if kind.on_gpu]
    for card in _cards_to_advise_on(config, gpu_kinds):
        advice = advise(config, shape, CARDS[card])
        if advice is not None:
            yield "", f"to fit {card} cards: {' '.join(advice[0])}"
            return
        yield "", f"to fit {card} cards: changing keys one at a time does not suffice; use more ranks"


def _cards_to_advise_on(config: Config, kinds: Sequence[RankMemory]) -> list[str]:
    """Usual cards that are too small, the smallest first. If there are none: in a dry run the largest card that is
    too small, else nothing, since advice takes seconds for the largest models."""
    small = [card for card, num_bytes in CARDS.items() if not all(kind.fits(num_bytes) for kind in kinds)]
    usual = [card for card in small if CARDS[card] >= CARDS[USUAL_CARD]]
    return usual or (small[-1:] if config.dry_run else [])


def _host_rows(config: Config, layout: RoleLayout, kinds: Sequence[RankMemory]) -> Iterator[PlanRow]:
    """Host memory of each component's fullest node, and whether it exceeds the available memory."""
    for component in Placement.from_config(config, layout).components:
        need = max(host_bytes(kinds, node) for node in component.nodes)
        if not need:
            continue
        there, whose = host_memory(config, component)
        here = config.cluster.name == "local" and not config.cluster.components
        where, which = ("here", "this machine has") if here else (f"of a node of {component.name}", f"{whose} requests")
        if here and "cgroup" in whose:
            which = f"{whose} is"
        text = f"all ranks {where} together: {size(need)} of host memory at most"
        if there:
            text += f"; {which} {size(there)}" + ("" if need <= there else ", which is not enough")
        yield "", text


def host_memory(config: Config, component: Component) -> tuple[int, str]:
    """A node's host memory in bytes and its source: this machine's limit, or the component's request; 0 if unknown."""
    if config.cluster.name == "local" and not config.cluster.components:
        return memory_limit()
    return memory_bytes(component.config.memory or "0"), "its memory key"


def check_host_memory(config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[Problem]:
    """Refuses a run whose ranks need more host memory than this machine, or their component's `memory` key, has."""
    if config.cluster.oversubscribe or config.debug == "fake":
        return
    kinds = memory(config, layout, shape)
    for component in Placement.from_config(config, layout).components:
        there, whose = host_memory(config, component)
        node = max(component.nodes, key=lambda node: excess(kinds, node, there))
        if not (over := excess(kinds, node, there)):
            continue
        key = ("cluster", "components", component.name, "memory") if "key" in whose else ("cluster",)
        text = (
            f"the plan needs {size(there + over)} of host memory for rank(s) {_span(tuple(node))}, {whose} is "
            f"{size(there)}: see dry_run=true for its parts; use a smaller trainer.max_tokens_per_micro_batch, "
            "model.dtype=bfloat16 (with trainer.param_dtype and generator.dtype), more nodes or more memory, or set "
            "cluster.oversubscribe=true"
        )
        yield Problem(key, f"{'.'.join(key)}: {text}", (("layout",), ("model",)))


def update_rows(config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[PlanRow]:
    """Weight bytes that each rank sends or receives, and the minimum time; empty for an engine without a plan."""
    if not layout.replicas:
        return
    try:
        train_plan(config)
    except CannotPlanError:
        return
    received, sent = update_traffic(config, layout, shape)
    if not received:  # trainer and generator are one rank
        return
    rate = config.cluster.link_gb_per_s
    way = "by the trainers' gather" if layout.generates_on_trainers else "from the trainer ranks that hold them"
    yield (
        "update",
        f"new weights {way}: {size(received)} to each generator rank, {size(sent)} from each trainer rank, at least "
        f"{_seconds(max(received, sent) / (rate * 1e9))} at {rate:g} GB/s (cluster.link_gb_per_s)",
    )
    if sends_over_nccl(config, layout):
        groups = weight_groups(config, layout)
        yield (
            "",
            f"over {groups.of_trainer} NCCL communicator(s) a trainer rank, about {size(groups.trainer_bytes)} of "
            f"buffers, and {groups.of_generator} a generator rank, {size(groups.generator_bytes)}; made at the start, "
            f"one after another, in about {_seconds(groups.seconds)}",
        )


def step_rows(config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[PlanRow]:
    """Bytes that trainer ranks exchange in an optimizer step; empty if there are none or they are unknown."""
    work = StepWork.of(config, len(layout.division("trainer").groups))
    try:
        sent = train_plan(config).step_traffic(config, shape, len(layout.ranks["trainer"]), work)
    except CannotPlanError:
        return
    if not sent:
        return
    total, rate = total_bytes(sent), config.cluster.link_gb_per_s
    parts = {each.what: 0 for each in sent}
    for each in sent:
        parts[each.what] += each.num_bytes
    yield (
        "step",
        f"an optimizer step sends at most {size(total)} from each trainer rank to the others "
        f"({', '.join(f'{what} {size(num_bytes)}' for what, num_bytes in parts.items())}): "
        f"{_seconds(total / (rate * 1e9))} if all of it takes links of {rate:g} GB/s (cluster.link_gb_per_s)",
    )


def storage_rows(config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[PlanRow]:
    """Size of a checkpoint and the time to write it."""
    try:
        num_bytes = whole_checkpoint_bytes(config, shape)
    except CannotPlanError as error:
        yield "saves", f"cannot be planned: {error}"
        return
    rate = config.cluster.storage_gb_per_s
    kept = config.keep_checkpoints + (config.keep_best.metric is not None)
    total = (kept + 1) * num_bytes
    yield (
        "saves",
        f"{size(num_bytes)} a checkpoint, {_seconds(num_bytes / (rate * 1e9))} at {rate:g} GB/s "
        f"(cluster.storage_gb_per_s); {kept} are kept and one is written: {size(total)}",
    )
    if (free := _free_bytes(Path(config.run_dir))) is not None and free < total:
        yield "", f"the file system of the run folder has {size(free)} free, which is not enough"


def _free_bytes(folder: Path) -> int | None:
    """Free bytes for a user on the file system of a folder, which need not exist yet; None if unknown."""
    there = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), Path("/"))
    try:
        found = os.statvfs(there)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _cards(kind: RankMemory) -> str:
    """The smallest card that fits, and the number of responses in the KV cache on this and larger cards."""
    if not kind.on_gpu:
        return ""
    free = f"{RESERVE:.0%} kept free"
    fitting = [card for card, num_bytes in CARDS.items() if kind.fits(num_bytes)]
    if not fitting:
        return f"; fits none of {', '.join(CARDS)} ({free})"
    larger = " and larger" if len(fitting) > 1 else ""
    held: dict[int, str] = {}  # the smallest card for each
    for card in fitting:
        held.setdefault(kind.responses(CARDS[card]), card)
    cache = ", ".join(f"{number} on {card}" for number, card in held.items() if number)
    return f"; fits {fitting[0]}{larger} ({free})" + (f"; full responses in the KV cache: {cache}" if cache else "")


def _parts(kind: RankMemory, phase: Phase) -> Iterator[str]:
    """The parts of a phase, one line per role, the largest first."""
    for role in kind.roles:
        mine = [part for part in kind.parts_of(phase, on_host=not kind.on_gpu) if part.role == role]
        if mine:
            yield f"{role}: " + ", ".join(map(_part, sorted(mine, key=lambda part: -part.num_bytes)))


def _part(part: Part) -> str:
    if part.least is None:
        return f"{part.name} {size(part.num_bytes)}"
    return f"{part.name} {size(part.least)} (one response of full length; for all slots {size(part.num_bytes)})"


def _span(ranks: tuple[int, ...]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _number(hours: float) -> str:
    """Hours with up to four decimals: a node for a second is not 0."""
    return f"{hours:,.4f}".rstrip("0").rstrip(".")


def _seconds(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(num_bytes: int) -> str:
    """Bytes as text."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes / 1024:.3g} KiB"
