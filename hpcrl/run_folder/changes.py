"""The stored configuration of a run, and the keys that may differ at a resume."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hpcrl.config import Config, ConfigError, parse
from hpcrl.config.config_file import arguments_in
from hpcrl.config.renamed_keys import with_new_names
from hpcrl.run_folder.branches import BRANCH_KEYS, OPENING_KEYS
from hpcrl.run_folder.records import CONFIG
from hpcrl.spec.table import SpecError
from hpcrl.spec.tables import GEN_ENGINES, PIPELINES, TRAIN_ENGINES
from hpcrl.system.files import open_regular

_DIVISION = (
    "trainer.max_tokens_per_micro_batch",
    "trainer.logits_chunk_tokens",
    "generator.max_num_seqs",
    "generator.decode_chunk_tokens",
    *(f"judge.{key}" for key in ("max_num_seqs", "max_requests", "decode_chunk_tokens")),
    *(f"reward_model.{key}" for key in ("max_tokens_per_batch", "max_requests")),
)
MAY_CHANGE = (
    "max_steps",
    "save_every",
    "eval_every",
    "keep_checkpoints",
    "prune_when_full",
    "max_failed_saves",
    "keep_best",
    "resume",
    "dry_run",
    "check_weights",
    "model.mtp",
    "reference.cache",
    "run_name",
    "run_dir",
    "trackers",
    "tracking",
    "profile",
    *(
        f"teacher.endpoint.{key}"
        for key in ("url", "protocol", "api_key_env", "timeout_s", "retry_s", "backoff_s", "max_in_flight")
    ),
    "trainer.max_mismatch",
    "trainer.engine",
    "critic.engine",
    "teacher.engine",
    "timeline",
    "timeouts",
    "cluster",
    "layout",
)
"""Keys (with all below them) that may differ between attempts, in addition to division_keys(): they change how long and
where a run continues, not its results. A new max_steps also stretches a cosine, linear or wsd lr schedule from then
on. Another engine must be able to take over the state, and its section may differ, too; the teacher has no state."""
ENGINE_KEYS = ("trainer.engine", "critic.engine")
_ABSENT = object()


def division_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that divide the work over ranks and their memory, including keys of the engines. Other values of these keys
    change results only by rounding."""
    keys: list[str] = []
    for section, table in (("trainer", TRAIN_ENGINES), ("generator", GEN_ENGINES), ("judge", GEN_ENGINES)):
        entries, engine = dict(table.items()), str(config.get(section, {}).get("engine", ""))
        if ":" in engine:  # named by import path, so in no table
            entries[table[engine].name] = table[engine]
        for name, spec in entries.items():
            whole = spec.section is not None and set(spec.resume_keys) == set(spec.section.model_fields)
            keys += [f"{section}.{name}"] if whole else [f"{section}.{name}.{key}" for key in spec.resume_keys]
    for name, spec in PIPELINES.items():
        keys += [f"{name}.{key}" for key in spec.resume_keys]
    return (*keys, *_DIVISION)


def stored_config(run_dir: Path) -> Config:
    """The configuration of a run folder. ConfigError if it is damaged or of another version."""
    stored = read_config(run_dir)
    try:
        return parse(stored)
    except ConfigError as error:
        raise ConfigError([f"{run_dir / CONFIG}: {line}" for line in error.problems]) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.yaml, with the keys of this version. ConfigError if it is damaged."""
    try:
        with open_regular(folder / CONFIG) as file:
            stored = yaml.safe_load(file.read().decode())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"{folder / CONFIG} cannot be read: {' '.join(str(error).split())}"]) from error
    if not isinstance(stored, dict):
        raise ConfigError([f"{folder / CONFIG} contains no configuration; {folder} is not a run folder of hpcrl"])
    return with_new_names(stored)


def read_arguments(folder: Path) -> tuple[str, ...] | None:
    """The arguments that made config.yaml; None if unknown."""
    try:
        return arguments_in((folder / CONFIG).read_text())
    except (OSError, ValueError):
        return None


def effective(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration as it is read back after storing (tuples become lists), with its run folder."""
    return yaml.safe_load(yaml.safe_dump(dict(config), sort_keys=False)) | {"run_dir": str(folder)}


def permitted_changes(
    config: Mapping[str, Any], folder: Path, branch: bool = False, explicit: Iterable[str] | None = None
) -> list[str]:
    """`key: old -> new` for every key that differs from the stored configuration. ConfigError lists the keys that may
    not differ at a resume or, with `branch`, at a branch.

    `explicit` are the keys that the command line gives, None if unknown: at a branch, no other key of BRANCH_KEYS may
    differ, so an argument that is left out changes nothing unnoticed.
    """
    stored, new = _complete(read_config(folder), effective(config, folder))
    changes = [(key, line) for key, line in differences(stored, new) if key not in OPENING_KEYS]
    sections, obstacle = _of_engines(stored, new)
    may_change = (*MAY_CHANGE, *division_keys(config), *sections)
    if "train" in ((each.get("model") or {}).get("mtp") for each in (stored, new)):  # it changes what checkpoints have
        may_change = tuple(key for key in may_change if key != "model.mtp")
    refused = [line for key, line in changes if not is_below(key, may_change)]
    of_branch = [key for key, line in changes if is_below(key, BRANCH_KEYS) and line in refused]
    if branch:
        refused = _refused_at_branch(stored, changes, refused, of_branch, explicit)
    if obstacle:
        refused += [f"{line}: {obstacle}" for key, line in changes if key in ENGINE_KEYS]
    if refused:
        head = f"{folder} holds a run of another configuration; use its values, another run_name, or resume=fresh"
        if branch:
            head = f"{head} (resume_from lets only the optimizer's and the loss's keys change)"
        elif of_branch:
            head += f"; {', '.join(of_branch)} may change at a branch, with resume_from=latest or a checkpoint's step"
        raise ConfigError([f"{head}:", *(f"  {line}" for line in refused)])
    return [line for _, line in changes]


def _refused_at_branch(
    stored: Mapping[str, Any],
    changes: Iterable[tuple[str, str]],
    refused: Iterable[str],
    of_branch: Iterable[str],
    explicit: Iterable[str] | None,
) -> list[str]:
    """The lines that stay refused at a branch. `of_branch` are the keys that may change there."""
    told, given = dict(changes), None if explicit is None else list(explicit)
    lines = [line for line in refused if line not in {told[key] for key in of_branch}]
    for key in of_branch:
        if given is not None and not is_below(key, given):
            lines.append(f"{told[key]}: the command line does not give it; a branch changes only what it gives")
        elif key == "rollout.temperature" and (stored.get("rollout") or {}).get("max_staleness"):
            lines.append(f"{told[key]}: with rollout.max_staleness, the checkpoint has responses drawn at the old one")
    return lines


def _of_engines(stored: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], str]:
    """(sections of training engines that may differ because no role keeps that engine, why a new engine cannot take
    over the old engine's state); empty without another engine, or an obstacle."""
    before, now = _engines(stored), _engines(new)
    changed = [role for role in now if before[role] != now[role]]
    if not changed:
        return [], ""
    trainer = stored.get("trainer") or {}
    optimizer, rank = trainer.get("optimizer", "adamw"), (trainer.get("lora") or {}).get("rank", 0)
    kept = {now[role] for role in now if role not in changed}
    obstacles, sections = [], []
    stateful = [role for role in changed if role != "teacher"]
    of_state = {each[role] for each in (before, now) for role in stateful}
    for name in dict.fromkeys(engine for role in changed for engine in (before[role], now[role]) if engine):
        try:
            spec = TRAIN_ENGINES[name]
        except SpecError as error:
            obstacles.append(str(error))
            continue
        if name not in kept:
            sections.append(f"trainer.{spec.name if ':' in name else name}")
        if name not in of_state:
            continue
        if not spec.exchanges_state:
            obstacles.append(f"{name} exchanges no checkpoints with other engines")
        elif rank and not spec.exchanges_adapters and name in (before["trainer"], now["trainer"]):
            obstacles.append(f"the run trains adapters (trainer.lora.rank={rank}), which {name} does not exchange")
    if stateful and optimizer != "adamw":
        obstacles.append(
            f"the run has trainer.optimizer={optimizer}, and only AdamW's state goes from engine to engine"
        )
    return sections, "; ".join(obstacles)


def _engines(config: Mapping[str, Any]) -> dict[str, str]:
    """The engines of trainer, critic and teacher; empty if the configuration does not say."""
    trainer = str((config.get("trainer") or {}).get("engine") or "")
    own = {role: (config.get(role) or {}).get("engine") for role in ("critic", "teacher")}
    return {"trainer": trainer} | {role: str(engine or trainer) for role, engine in own.items()}


def is_below(key: str, keys: Iterable[str]) -> bool:
    """Whether a dotted key is in `keys`, or below one of them."""
    return any(f"{key}.".startswith(f"{other}.") for other in keys)


def _complete(old: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Adds to the stored values the keys that its version lacked; unchanged if it had keys that no longer exist."""
    try:
        return parse(old).model_dump(mode="json"), parse(new).model_dump(mode="json")
    except ConfigError:
        return old, new


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(key, `key: old -> new`) for every leaf that differs, in the order of the new values."""
    before, after = dict(dotted_leaves(old)), dict(dotted_leaves(new))
    changed = (key for key in after | before if before.get(key, _ABSENT) != after.get(key, _ABSENT))
    return [(key, f"{key}: {_show(before, key)} -> {_show(after, key)}") for key in changed]


def _show(leaves: Mapping[str, Any], key: str) -> str:
    return json.dumps(leaves[key], default=str) if key in leaves else "(not set)"


def dotted_leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value in nested data; an empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from dotted_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
