"""Suggest changes with which a run fits its GPUs: try changes, cheapest first, and keep a change only if it helps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel

from hpcrl.cluster.layout import RoleLayout, check_layout
from hpcrl.config import Config
from hpcrl.models.shape import ModelShape
from hpcrl.planner.memory import check_sizes, memory
from hpcrl.planner.memory_parts import Change
from hpcrl.planner.trainer import train_plan
from hpcrl.spec.problems import Path, dotted
from hpcrl.spec.tables import GEN_ENGINES, ROLES

SMALLEST_CHUNK = 1024
SMALLEST_SLOTS = 16
LESS = 0.99
"""A change is kept if it leaves at most this share of the fullest rank's bytes."""

M = TypeVar("M", bound=BaseModel)


def advise(config: Config, shape: ModelShape, card_bytes: int) -> tuple[list[str], Config] | None:
    """(command-line arguments, resulting configuration) with which every rank fits the card; None if none are found."""
    words: dict[str, str] = {}
    best = _misfit(config, shape, card_bytes)
    for _ in range(32):  # each change is repeated until it no longer helps
        if not best:
            return [f"{key}={value}" for key, value in words.items()], config
        for path, value in _changes(config, shape):
            changed = _with(config, path, value)
            left = _misfit(changed, shape, card_bytes) if _possible(changed, shape) else best
            if left <= best * LESS:
                config, best = changed, left
                words[dotted(path)] = str(value).lower()
                break
        else:
            return None
    return None


def _misfit(config: Config, shape: ModelShape, card_bytes: int) -> int:
    """Bytes of the fullest GPU rank that does not fit the card; 0 if all ranks fit."""
    ranks = [rank for rank in memory(config, RoleLayout.from_config(config), shape) if rank.on_gpu]
    return max((rank.peak(least=True)[1] for rank in ranks if not rank.fits(card_bytes)), default=0)


def _possible(config: Config, shape: ModelShape) -> bool:
    return not check_layout(config) and not check_sizes(config, RoleLayout.from_config(config), shape)


def _changes(config: Config, shape: ModelShape) -> Iterator[Change]:
    """Changes, cheapest first: those that cost time, then precision, then nodes."""
    trainer, generator, layout = config.trainer, config.generator, config.layout
    trains = config.pipeline_spec.trains
    own = train_plan(config).changes(config, shape) if trains else {}
    if trains and layout.offload == "auto":
        yield ("layout", "offload"), "always"
    half = trainer.max_tokens_per_micro_batch // 2
    if trains and half >= config.max_row_tokens:
        yield ("trainer", "max_tokens_per_micro_batch"), half
    yield from own.get("time", ())
    if trains and trainer.logits_chunk_tokens > SMALLEST_CHUNK:
        yield ("trainer", "logits_chunk_tokens"), SMALLEST_CHUNK
    yield from own.get("recompute", ())
    if generator.max_num_seqs >= 2 * SMALLEST_SLOTS:
        yield ("generator", "max_num_seqs"), generator.max_num_seqs // 2
    if trains:
        yield ("trainer", "param_dtype"), "bfloat16"
    yield ("generator", "dtype"), "bfloat16"
    if GEN_ENGINES[generator.engine].tensor_parallel:
        yield ("layout", "generator", "tensor_parallel"), 2 * layout.generator.tensor_parallel
    yield from own.get("ranks", ())
    for role, spec in ROLES.items():
        ranks = layout.of(role)
        if role == "trainer" and not trains:
            continue
        if spec.holds_model and not spec.forms_replicas and ranks.num_ranks and ranks.colocate_with is None:
            yield ("layout", role, "num_ranks"), 2 * ranks.num_ranks


def _with(section: M, path: Path, value: Any) -> M:
    key, rest = str(path[0]), path[1:]
    return section.model_copy(update={key: _with(getattr(section, key), rest, value) if rest else value})
