"""Creates a run folder, or reopens it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hpcrl.config import ConfigError
from hpcrl.config.config_file import write_config
from hpcrl.run_folder.branches import REASON, RESUME_FROM, Branch, branches_of, find_branch, is_same
from hpcrl.run_folder.changes import effective, permitted_changes, read_config
from hpcrl.run_folder.models import check_models, check_weights, models_of, weights_of
from hpcrl.run_folder.ownership import check_free, claim
from hpcrl.run_folder.provenance import machine_facts
from hpcrl.run_folder.records import (
    CONFIG,
    FACTS,
    FINISHED,
    OWNERS,
    PLAN,
    SLURM,
    newest_attempt,
    read_attempts,
    read_finished,
)
from hpcrl.system.files import write_durably

EVALUATED = "evaluated"
"""What `hpcrl eval` made of a run before its own run folder began: the keys and the model of a checkpoint."""


@dataclass(frozen=True)
class RunState:
    """State of a run folder.

    Args:
        attempt: From open_run, the attempt that this process owns; from check_run, the newest so far (0 if none).
        changes: Permitted differences from the stored configuration.
        branch: The branch that this start opens (resume_from); None if it opens none.
        from_step: The step of a branch whose later work is still to be set aside; None: the newest checkpoint.
        lineage: About a branch that is opened, or that goes on though resume_from is given; else empty.
        finished: Content of finished.json if `kind` is "finished".
        ignored: From the launch: what files (conf/, --config) now set differently, which the run ignores.
        arguments: From the launch: the arguments that made the configuration; None if unknown.
    """

    run_dir: Path
    kind: Literal["fresh", "resume", "finished"]
    attempt: int = 0
    changes: list[str] = field(default_factory=list)
    finished: dict[str, Any] = field(default_factory=dict)
    branch: Branch | None = None
    from_step: int | None = None
    lineage: str = ""
    ignored: list[str] = field(default_factory=list)
    arguments: tuple[str, ...] | None = None


def check_run(
    config: Mapping[str, Any], run_dir: str | Path, resume: str, explicit: Sequence[str] | None = None
) -> RunState:
    """The state that open_run would find; writes nothing. `explicit` as for permitted_changes(). ConfigError, one line
    per problem: the folder is unusable, holds files but no run, has another configuration or other models, or is owned
    by a live process or job; resume_from names no checkpoint."""
    folder = _fresh_name(Path(run_dir).absolute()) if resume == "fresh" else Path(run_dir).absolute()
    _check_place(folder)
    asked, reason = config.get(RESUME_FROM), str(config.get(REASON) or "")
    if not (folder / CONFIG).exists():
        if asked is not None and resume != "fresh":  # that is refused as it is
            raise ConfigError([f"resume_from: {asked}, but {folder} holds no run to continue"])
        return RunState(folder, "fresh", check_free(folder))
    attempts = read_attempts(folder)
    pending = read_config(folder).get(RESUME_FROM)
    newest: dict[str, Any] = next(reversed(branches_of(attempts)), {})
    max_steps = int(config.get("max_steps", 0))
    if asked is not None and not (is_same(newest, asked, reason) and _is_resume(config, folder)):
        permitted = permitted_changes(config, folder, branch=True, explicit=explicit)
        check_models(config, attempts)
        check_weights(config, attempts)
        attempt = check_free(folder)
        branch = find_branch(folder, asked, reason, max_steps)
        told = f"branch from step {branch.step}, later work moves to abandoned/"
        return RunState(folder, "resume", attempt, permitted, branch=branch, from_step=branch.step, lineage=told)
    permitted = permitted_changes(config, folder)
    check_models(config, attempts)
    check_weights(config, attempts)
    finished = read_finished(folder)
    if finished and max_steps <= finished["max_steps"] and pending is None:
        return RunState(folder, "finished", newest_attempt(folder), permitted, finished)
    told = f"goes on with the branch from step {newest['from']} of attempt {newest['attempt']}" if asked else ""
    return RunState(folder, "resume", check_free(folder), permitted, from_step=pending, lineage=told)


def _is_resume(config: Mapping[str, Any], folder: Path) -> bool:
    """Whether a plain resume may make all changes."""
    try:
        permitted_changes(config, folder)
    except ConfigError:
        return False
    return True


def open_run(
    config: Mapping[str, Any],
    run_dir: str | Path,
    resume: str,
    plan: str = "",
    arguments: Sequence[str] | None = None,
    image_tokens: int | None = None,
) -> RunState:
    """Create or reopen the run folder and own it until close_run or the end of this process (cluster=slurm: of the
    job).

    A finished run is returned without taking ownership; otherwise config.yaml (with the arguments that made it, if
    known), facts.json (with image_tokens, a row's at most, if they were counted) and, if `plan` is given, plan.txt then
    describe this attempt. Use the returned run_dir: `resume=fresh` gives `NAME-2`, `NAME-3`, ... if NAME exists.
    ConfigError as in check_run, also if another launch was faster.
    """
    while True:
        found = check_run(config, run_dir, resume)
        if found.kind == "finished":
            return found
        opened = replace(found, attempt=found.attempt + 1)
        try:
            lasts = config.get("cluster", {}).get("name", "local") == "local"
            if claim(opened.run_dir, opened.attempt, lasts):
                _describe(config, opened, plan, arguments, image_tokens)
                return opened
        except OSError as error:
            raise ConfigError([f"run folder {found.run_dir} cannot be written: {error}"]) from error


def _check_place(folder: Path) -> None:
    """Check that the folder is a run, is empty, or can be created."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    except OSError as error:
        raise ConfigError([f"run folder {folder} cannot be created: {error.strerror}"]) from error
    if not existing.is_dir():
        raise ConfigError([f"run folder {folder} cannot be created: {existing} is not a folder"])
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError([f"run folder {folder} cannot be written: no permission in {existing}"])
    longest = os.pathconf(existing, "PC_NAME_MAX")
    if name := next((part for part in folder.parts if len(os.fsencode(part)) > longest), ""):
        raise ConfigError([f"run folder {folder} cannot be created: a name of {len(name)} characters, limit {longest}"])
    if existing == folder and not (folder / CONFIG).exists():
        own = (
            SLURM,
            OWNERS,
            FACTS,
            PLAN,
            EVALUATED,
            f".{FACTS}.tmp",
            f".{PLAN}.tmp",
            f".{CONFIG}.tmp",
        )  # killed before config.yaml was written
        foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in own)
        if foreign:
            shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise ConfigError([f"{folder} is not a run folder: no {CONFIG}, but {shown}; choose another run_dir"])


def _fresh_name(folder: Path) -> Path:
    """The first of NAME, NAME-2, NAME-3, ... that does not exist or is empty."""
    number, free = 1, folder
    while free.exists() and any(free.iterdir() if free.is_dir() else [free]):
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _describe(
    config: Mapping[str, Any], run: RunState, plan: str, arguments: Sequence[str] | None, image_tokens: int | None
) -> None:
    """Update config.yaml, facts.json and plan.txt for the attempt that begins."""
    folder = run.run_dir
    attempts = read_attempts(folder)
    own: dict[str, Any] = {
        "attempt": run.attempt,
        "kind": run.kind,
        "changes": run.changes,
        "models": models_of(config),
        "weights": weights_of(config),
    }
    counted = {} if image_tokens is None else {"image_tokens": image_tokens}
    stored = effective(config, folder)
    reason = str(stored.get(REASON) or "")
    if run.from_step is None:
        stored |= {key: value for key, value in ((RESUME_FROM, None), (REASON, "")) if key in stored}
    else:
        before = read_config(folder)
        stored |= {RESUME_FROM: run.from_step, REASON: reason or before.get(REASON) or ""}
        # First, so a launch killed in between has opened the branch or not; a repetition then records it.
        write_durably(folder / CONFIG, write_config(stored, arguments))
        recorded = branches_of(attempts)
        if run.branch is None and not (recorded and recorded[-1]["from"] == run.from_step):
            own["branch"] = Branch(run.from_step, run.from_step, stored[REASON]).record([], arguments)
    if run.branch is not None:
        own["branch"] = run.branch.record(run.changes, arguments)
    attempts.append(own | counted | machine_facts())
    write_durably(folder / FACTS, json.dumps({"attempts": attempts}, indent=1).encode())
    if plan:
        write_durably(folder / PLAN, plan.encode())
    write_durably(folder / CONFIG, write_config(stored, arguments))
    (folder / FINISHED).unlink(missing_ok=True)
