"""The layout that wrote a checkpoint, and how the layout that reads it differs."""

from __future__ import annotations

import functools
from typing import Any

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.config.renamed_keys import with_new_keys
from hpcrl.run_folder import ENGINE_KEYS, division_keys
from hpcrl.spec.tables import ROLES


def layout_facts(config: Config, layout: RoleLayout) -> dict[str, Any]:
    """Further conditions of bit-identical results in a deterministic run, by key."""
    values = config.model_dump(mode="json")
    own = ("layout.generator.tensor_parallel", "cluster.device", "cluster.threads_per_rank", *ENGINE_KEYS)
    keys = (*own, *division_keys(values))
    ranks: dict[str, Any] = {f"{role} ranks": list(ranks) for role, ranks in layout.ranks.items()}
    for role, division in layout.divisions.items():
        ranks[_sharing(role)] = len(division.groups[0])
    found = {key: functools.reduce(lambda at, name: at[name], key.split("."), values) for key in keys}
    ranks |= {"teacher.engine": config.teacher_engine} if config.uses_teacher else {}
    return ranks | found | {"critic.engine": config.critic_engine}


def _sharing(role: str) -> str:
    return f"ranks that share the rows of {role}"


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Differences from the layout that wrote a checkpoint, as text; empty without any."""
    # Defaults for keys that earlier versions did not write.
    defaults: dict[str, Any] = dict.fromkeys(map(_sharing, ROLES), 1) | {f"{role} ranks": [] for role in ROLES}
    defaults |= {key: 1 for key in now if key.endswith("_parallel")}  # splits that earlier versions did not have
    before = defaults | {key: now[key] for key in ENGINE_KEYS if key in now} | with_new_keys(before)
    if before.get("critic.engine") is None:  # an earlier version, and the critic has the policy's engine
        before["critic.engine"] = before.get("trainer.engine")
    keys = [key for key in now if before.get(key) != now[key]]
    return ", ".join(f"{key} {_shown(before.get(key))} (now {_shown(now[key])})" for key in keys)


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) > 2:  # ranks, which are consecutive
        return f"{value[0]}..{value[-1]}"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
