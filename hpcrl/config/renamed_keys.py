"""Renamed keys: an error names the new key, and stored configurations are converted to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.spec.problems import Path, dotted

RENAMED = {
    # until 0.6
    "rollouts": "load_rollouts",
    "data.tag_key": "data.domain_key",
    "data.train.*.tag": "data.train.*.domain",
    "data.val.*.tag": "data.val.*.domain",
    "rollout.max_lag": "rollout.max_staleness",
    "rollout.siblings_together": "rollout.group_affinity",
    "rollout.spare_slow_replicas": "rollout.speed_aware_routing",
    "algorithm.name": "algorithm.advantage_estimator",
    "generator.max_slots": "generator.max_num_seqs",
    "generator.burst_tokens": "generator.decode_chunk_tokens",
    "generator.native.kv_bucket": "generator.native.block_tokens",
    "generator.vllm.memory_share": "generator.vllm.gpu_memory_utilization",
    "generator.vllm.eager": "generator.vllm.enforce_eager",
    "generator.sglang.memory_share": "generator.sglang.mem_fraction_static",
    "judge.max_slots": "judge.max_num_seqs",
    "judge.burst_tokens": "judge.decode_chunk_tokens",
    "judge.native.kv_bucket": "judge.native.block_tokens",
    "judge.vllm.memory_share": "judge.vllm.gpu_memory_utilization",
    "judge.vllm.eager": "judge.vllm.enforce_eager",
    "judge.sglang.memory_share": "judge.sglang.mem_fraction_static",
}
"""Dotted key of an earlier version -> its current name; `*` stands for a position in a list."""

RENAMED_VALUES = {("pipeline", "rlvr_vl"): "rlvr, for rows with and without images"}
"""Key and value of an earlier version -> the value's current name."""

_BY_PATTERN = {"^" + re.escape(old).replace(r"\*", r"\d+") + "$": new for old, new in RENAMED.items()}
_WORD = re.compile(r"(\+{0,2}|~)([\w.]+)(?==|$)")


def new_name(path: Path) -> Path | None:
    """The current path of an earlier version's key; None for any other key."""
    new = next((new for old, new in _BY_PATTERN.items() if re.match(old, dotted(path))), None)
    return None if new is None else (*path[:-1], new.rpartition(".")[2])


def with_new_names(stored: Mapping[str, Any], at: Path = ()) -> dict[str, Any]:
    """A stored configuration, with the keys of this version."""
    renamed = {}
    for key, value in stored.items():
        path = (*at, key)
        if isinstance(value, Mapping):
            value = with_new_names(value, path)
        elif isinstance(value, list):
            value = [with_new_names(v, (*path, i)) if isinstance(v, Mapping) else v for i, v in enumerate(value)]
        renamed[str((new_name(path) or path)[-1])] = value
    return renamed


def with_new_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values and sections by dotted key, with the keys of this version."""
    return {
        _new_key(key): with_new_names(value, tuple(key.split("."))) if isinstance(value, Mapping) else value
        for key, value in values.items()
    }


def arguments_with_new_names(arguments: Sequence[str]) -> tuple[str, ...]:
    """Stored arguments of a command line, with the keys of this version."""
    return tuple(a if a.startswith("--") else _WORD.sub(_renamed_argument, a, count=1) for a in arguments)


def _renamed_argument(found: re.Match[str]) -> str:
    return found[1] + _new_key(found[2])


def _new_key(key: str) -> str:
    new = new_name(tuple(key.split(".")))
    return key if new is None else dotted(new)
