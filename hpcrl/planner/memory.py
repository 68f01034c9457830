"""Memory of each kind of rank, on the GPU and in host memory: the sum of its roles' parts, and whether it fits."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcrl.cluster.layout import ENGINE_ROLES, RoleLayout
from hpcrl.config import Config, Problem, RoleName
from hpcrl.models.families import read_shape
from hpcrl.models.shape import CannotPlanError, ModelShape
from hpcrl.planner.adapters import check_frozen, check_targets
from hpcrl.planner.generator import (
    check_engine_sizes,
    check_replicas_split,
    generator_parts,
    response_bytes,
    rollout_transfer_parts,
    shares_weights,
)
from hpcrl.planner.image_memory import controller_pixels, pixel_parts, scorer_pixels, with_row_tokens
from hpcrl.planner.memory_parts import PHASES, Part, Phase, has_gpus
from hpcrl.planner.taught_memory import HEAD
from hpcrl.planner.traffic import weight_groups
from hpcrl.planner.trainer import check_critic, check_reference, check_teacher, train_plan, trained_shape
from hpcrl.spec.table import load
from hpcrl.spec.tables import GEN_ENGINES, ROLES

CARDS = {
    "40 GB": 39 << 30,
    "48 GB": 44 << 30,  # an L40S, reduced by error correction; an A6000 shows 47
    "64 GB": 63 << 30,
    "80 GB": 79 << 30,
    "94 GB": 93 << 30,
    "141 GB": 139 << 30,
}
"""Bytes of memory that CUDA shows, by card, the smallest card first."""
USUAL_CARD = "80 GB"
"""The smallest card for which every plan suggests changes. With layout.offload=auto, ranks that exceed it offload."""
RESERVE = 0.1
"""Share of a card for the CUDA context, NCCL buffers of engines' groups, kernels' workspaces, and fragmentation."""
PROGRAM_BYTES = 555 << 20
"""Resident memory of a rank without a model, with torch for CPUs. Measured are 410 MiB; 490 with triton; 523 to 533
with accelerate, which transformers imports if it is installed. A little more is counted, so no plan reports less than
a rank uses."""
LEARNING: tuple[Phase, ...] = ("train", "update")


@dataclass(frozen=True)
class RankMemory:
    """Memory of the fullest of several ranks with the same roles. `on_gpu` means that each rank has its own GPU."""

    ranks: tuple[int, ...]
    roles: tuple[RoleName, ...]
    parts: tuple[Part, ...]
    on_gpu: bool
    cache_bytes: int
    """Bytes of one full-length response in the KV cache; 0 if nothing is generated."""
    offloads: bool = False
    """Whether training engines and generator take turns on the device (layout.offload)."""
    generator_share: float = 1.0
    """Maximum share of a card that the generation engine uses."""
    controller_bytes: int = 0
    """Bytes of host memory that rank 0 needs as the run's controller, in addition."""
    scorers: tuple[int, ...] = ()
    """The run's reward ranks, which may hold no model."""
    scorer_bytes: int = 0
    """Bytes of host memory that each reward rank needs, in addition."""

    def total(self, phase: Phase, on_host: bool = False, least: bool = False) -> int:
        """Bytes during a phase on the GPU or in host memory. `least` counts caches with their minimum size."""
        parts = self.parts_of(phase, on_host)
        return sum(part.least if least and part.least is not None else part.num_bytes for part in parts)

    def parts_of(self, phase: Phase, on_host: bool = False) -> list[Part]:
        """The parts during a phase on the GPU or in host memory."""
        return [p for p in self.parts if phase in p.during and (p.on_host or not self.on_gpu) == on_host]

    def peak(self, on_host: bool = False, least: bool = False) -> tuple[Phase, int]:
        """The phase with the most bytes, and its bytes."""
        totals = {phase: self.total(phase, on_host, least) for phase in PHASES}
        return max(totals.items(), key=lambda item: item[1])

    def fits(self, card_bytes: int) -> bool:
        """Whether the rank's GPU memory and the reserve fit on a card."""
        starts = self.start(card_bytes) <= card_bytes
        return starts and self.peak(least=True)[1] <= usable(card_bytes) and self._spare(card_bytes) >= 0

    def start(self, card_bytes: int) -> int:
        """Bytes on the GPU when the generation engine starts and allocates its share of the card, with the memory that
        other roles keep there during generation; 0 if the engine has no fixed share."""
        if self.generator_share == 1:
            return 0
        return self.beside_generator + int(card_bytes * self.generator_share)

    @property
    def beside_generator(self) -> int:
        """Bytes that other roles keep on the GPU during generation."""
        return sum(part.num_bytes for part in self.parts_of("generate") if part.role != "generator")

    def _spare(self, card_bytes: int) -> int:
        """Free bytes in the generation engine's share of a card, with a cache of minimum size."""
        parts = [part for part in self.parts_of("generate") if part.role == "generator"]
        needed = sum(part.num_bytes if part.least is None else part.least for part in parts)
        return int(card_bytes * self.generator_share) - needed

    def responses(self, card_bytes: int) -> int:
        """Number of full-length responses in the KV cache of a paged engine on this card; 0 for other engines, and if
        the rank does not fit."""
        own = (part for part in self.parts if part.role == "generator" and part.least is not None)
        cache = next(own, None)
        if cache is None or cache.least is None or not self.fits(card_bytes):
            return 0
        room = min(usable(card_bytes) - self.total(phase, least=True) for phase in cache.during)
        room = min(room, self._spare(card_bytes))
        return min(cache.num_bytes, cache.least + room) // self.cache_bytes


def usable(card_bytes: int) -> int:
    """Bytes of a card without the reserve."""
    return int(card_bytes * (1 - RESERVE))


def check_sizes(config: Config, layout: RoleLayout, shape: ModelShape) -> list[Problem]:
    """Problems between the trainer's and generator's sizes and the model or the ranks."""
    problems = [*check_replicas_split(config, shape), *check_engine_sizes(config, shape)] if layout.replicas else []
    if config.trainer.router_replay and not shape.expert_layers:
        text = f"{shape.family} has no experts; set it to false"
        problems.append(Problem(("trainer", "router_replay"), f"trainer.router_replay: {text}", (("model",),)))
    problems += [*check_targets(config, shape), *check_frozen(config, shape)]
    if not config.pipeline_spec.trains:
        return problems
    with contextlib.suppress(CannotPlanError):
        problems += train_plan(config).check(config, layout, shape)
        if config.uses_reference and config.reference.path is not None:
            problems += check_reference(config, layout, shape)
        if config.uses_teacher and not config.teacher_is_trainer:
            problems += [problem for problem in check_teacher(config, layout, shape) if problem not in problems]
        if config.uses_critic:
            problems += [problem for problem in check_critic(config, layout, shape) if problem not in problems]
    return problems


def memory(config: Config, layout: RoleLayout, shape: ModelShape) -> list[RankMemory]:
    """Memory of every kind of rank that holds a model; a kind has the same roles. The sizes must be valid
    (check_sizes). CannotPlanError for an engine whose memory is not known."""
    kinds: dict[tuple[RoleName, ...], list[int]] = {}
    for rank in range(layout.world_size):
        roles = tuple(role for role in layout.roles_of(rank) if role in ROLES and ROLES[role].holds_model)
        if roles:
            kinds.setdefault(roles, []).append(rank)
    return [_kind(config, layout, shape, roles, tuple(ranks)) for roles, ranks in kinds.items()]


def _kind(
    config: Config, layout: RoleLayout, shape: ModelShape, roles: tuple[RoleName, ...], ranks: tuple[int, ...]
) -> RankMemory:
    """Memory of the ranks with these roles. If roles take turns on the GPU, the generator sleeps during training; the
    trainer's state is in host memory during decoding and, except for weights, while weights are published. Otherwise,
    the roles' parts are summed."""
    on_gpu, mode = has_gpus(config, roles), config.layout.offload
    may = not {*ENGINE_ROLES}.isdisjoint(roles) and "generator" in roles and may_share_device(config, layout)
    apart = _summed(config, layout, shape, roles, ranks, shares=False)
    if not may or (mode == "auto" and not on_gpu):
        return apart
    sleeps = GEN_ENGINES[config.generator.engine].sleeps
    if shape.tower is not None:  # ranks decide without knowing the rows
        decisive = _summed(config, layout, with_row_tokens(shape, None), roles, ranks, shares=False)
    else:
        decisive = apart
    if mode == "always" or sleeps or not decisive.fits(CARDS[USUAL_CARD]):
        return _summed(config, layout, shape, roles, ranks, shares=True)
    return apart


def may_share_device(config: Config, layout: RoleLayout) -> bool:
    """Whether trainer and generator share ranks, are never active at the same time, and layout.offload allows turns."""
    shared = set(layout.ranks["trainer"]) & set(layout.ranks["generator"])
    return bool(shared) and config.layout.offload != "never" and config.rollout.max_staleness == 0


def _summed(
    config: Config,
    layout: RoleLayout,
    shape: ModelShape,
    roles: tuple[RoleName, ...],
    ranks: tuple[int, ...],
    shares: bool,
) -> RankMemory:
    parts: list[Part] = []
    on_gpu = has_gpus(config, roles)
    for role in roles:
        if path := ROLES[role].plan:
            parts += load(path, f"the plan of the role {role}")(config, shape, len(layout.ranks[role]))
    lent = shares_weights(config, layout)
    if shares:
        parts = [moved for part in parts for moved in _moves_out(part, on_gpu, lent)]
    if layout.replicas and layout.ranks["trainer"] and not {"trainer", "generator"}.isdisjoint(roles):
        parts += rollout_transfer_parts(config, layout, shape, roles)
        if sends_over_nccl(config, layout):
            groups = weight_groups(config, layout)
            sides = {"trainer": groups.trainer_bytes, "generator": groups.generator_bytes}
            parts += [Part(role, "NCCL buffers", sides[role]) for role in roles if role in sides]
    if "generator" in roles:
        awake: tuple[Phase, ...] = ("generate", "publish") if shares else PHASES
        own = generator_parts(config, shape, awake, ("generate",) if shares else PHASES, on_gpu)
        parts += [part for part in own if part.name != "weights"] if lent else own
    parts.append(Part(roles[0], "program", PROGRAM_BYTES, on_host=True))
    parts += [part for role in roles for part in pixel_parts(config, layout, shape, role)]
    if config.trainer.router_replay and config.learns_from_rewards:
        parts += _routes(config, shape, roles, layout)
    if not config.learns:
        parts = [replace(p, during=tuple(phase for phase in p.during if phase not in LEARNING)) for p in parts]
    cache = response_bytes(config, shape) if "generator" in roles else 0
    share = GEN_ENGINES[config.generator.engine].memory_share(config) if "generator" in roles else 1.0
    held = tuple(p for p in parts if p.num_bytes)
    pixels, scorers = controller_pixels(config, layout, shape), layout.ranks.get("reward", ())
    scored = scorer_pixels(config, layout, shape)
    return RankMemory(ranks, roles, held, on_gpu, cache, shares, share, pixels, scorers, scored)


def _routes(config: Config, shape: ModelShape, roles: Collection[RoleName], layout: RoleLayout) -> Iterator[Part]:
    """Host memory for the recorded experts of a step's responses at full length."""
    samples, longest = config.rollout.num_prompts * config.rollout.group_size, config.max_row_tokens
    if "trainer" in roles:  # two copies exist while a batch is assembled
        held = -(-samples // len(layout.division("trainer").groups)) * longest
        yield Part("trainer", "routes", 2 * held * shape.route_bytes, on_host=True)
    if "generator" in roles:  # with the routes of running responses, in a table that doubles its size when it is full
        held = -(-samples // len(layout.replicas)) * longest
        running = 2 * config.generator.max_num_seqs * config.max_response_tokens
        yield Part("generator", "routes", (held + running) * shape.route_bytes, on_host=True)


def _moves_out(part: Part, on_gpu: bool, lent: bool) -> list[Part]:
    """Split a permanent part of a training engine into GPU memory outside the generator's phases, and host memory,
    which is kept for the next offload (hpcrl.engines.train.offloading). The trainer's weights are on the GPU while they
    are published, and always if they are `lent` to the generator."""
    published = part.role == "trainer" and part.name == "weights"
    if part.role not in ENGINE_ROLES or part.on_host or part.during != PHASES or part.name == HEAD:
        return [part]
    if published and lent:
        return [part]
    away: tuple[Phase, ...] = ("generate",) if published else ("generate", "publish")
    stays = tuple(phase for phase in PHASES if phase not in away)
    return [replace(part, during=stays), replace(part, during=PHASES if on_gpu else away, on_host=True)]


def sends_over_nccl(config: Config, layout: RoleLayout) -> bool:
    """Whether new weights are sent from trainers' to generators' GPUs in NCCL groups (World.weights_group)."""
    both: tuple[RoleName, ...] = ("trainer", "generator")
    apart = bool(layout.replicas) and not layout.generates_on_trainers
    return apart and all(has_gpus(config, (role,)) for role in both)


def host_bytes(kinds: Sequence[RankMemory], ranks: Sequence[int]) -> int:
    """Bytes of host memory that these ranks of one node need in total; 0 if none of them holds a model or scores
    responses with images."""
    needs: Mapping[int, int] = {rank: kind.peak(on_host=True)[1] for kind in kinds for rank in kind.ranks}
    scored = kinds[0].scorer_bytes * len({*kinds[0].scorers}.intersection(ranks)) if kinds else 0
    if needs.keys().isdisjoint(ranks) and not scored:
        return 0
    controller = kinds[0].controller_bytes if 0 in ranks else 0
    return controller + scored + sum(needs.get(rank, PROGRAM_BYTES) for rank in ranks)


def planned_kinds(config: Config, layout: RoleLayout, image_tokens: int | None = None) -> list[RankMemory]:
    """The memory of every kind of rank that holds a model; empty if it cannot be planned or no rank holds one.
    `image_tokens` are a row's at most, None if they were not counted."""
    with contextlib.suppress(CannotPlanError, OSError, ValueError):
        if config.debug != "fake" and not config.pipeline_spec.rank0_only:
            path = config.model.path
            found = json.loads((Path(path) / "config.json").read_text()) if path else config.model.tiny.hf_config()
            shape = trained_shape(config, read_shape(found))
            return memory(config, layout, with_row_tokens(shape, image_tokens))
    return []


def shares_device(config: Config, layout: RoleLayout) -> bool:
    """Whether training engines and generator free memory for each other between phases (layout.offload)."""
    if not may_share_device(config, layout):
        return False
    return config.layout.offload == "always" or any(kind.offloads for kind in planned_kinds(config, layout))


def excess(kinds: Sequence[RankMemory], ranks: Sequence[int], there: int) -> int:
    """Bytes by which the ranks of a node that hold a model, or score responses with images, need more than `there`; 0
    if they fit or `there` is 0."""
    held = {rank for kind in kinds for rank in (*kind.ranks, *(kind.scorers if kind.scorer_bytes else ()))}
    return max(0, host_bytes(kinds, [rank for rank in ranks if rank in held]) - there) if there else 0
