"""Host memory that the ranks of a node need by the plan, to compare with what the node has."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.planner.memory import PROGRAM_BYTES, RankMemory, may_take_turns, memory
from hpcrl.planner.shapes import CannotPlanError, read_shape, tiny_config


def host_bytes(kinds: Sequence[RankMemory], ranks: Sequence[int]) -> int:
    """Bytes of host memory that these ranks of one node need together; 0 if none of them holds a model."""
    needs: Mapping[int, int] = {rank: kind.peak(on_host=True)[1] for kind in kinds for rank in kind.ranks}
    if needs.keys().isdisjoint(ranks):
        return 0
    return sum(needs.get(rank, PROGRAM_BYTES) for rank in ranks)


def planned_kinds(config: Config, layout: RoleLayout) -> list[RankMemory]:
    """The memory of every kind of rank that holds a model; empty if it cannot be planned or no rank holds one."""
    with contextlib.suppress(CannotPlanError, OSError, ValueError):
        if config.debug != "fake" and config.pipeline_spec.learns:
            path = config.model.path
            found = json.loads((Path(path) / "config.json").read_text()) if path else tiny_config(config.model.tiny)
            return memory(config, layout, read_shape(found))
    return []


def takes_turns(config: Config, layout: RoleLayout) -> bool:
    """Whether trainer and generator give memory back to each other between phases (layout.offload)."""
    if not may_take_turns(config, layout):
        return False
    return config.layout.offload == "always" or any(kind.offloads for kind in planned_kinds(config, layout))


def excess(kinds: Sequence[RankMemory], ranks: Sequence[int], there: int) -> int:
    """Bytes by which the ranks of a node that hold a model need more than `there`; 0 if they fit or `there` is 0."""
    held = {rank for kind in kinds for rank in kind.ranks}
    return max(0, host_bytes(kinds, [rank for rank in ranks if rank in held]) - there) if there else 0
