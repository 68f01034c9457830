"""Durable files and numbered step folders: what a killed program leaves is whole or absent."""

from __future__ import annotations

import os
import re
from pathlib import Path

STEP_NAME = re.compile(r"step_(\d{6,})")


def step_name(step: int) -> str:
    """`step_000012` for 12."""
    if step < 0:
        raise ValueError(f"a step counts from 0, got {step}")
    return f"step_{step:06d}"


def steps_in(folder: Path) -> list[int]:
    """Steps that have a folder `step_NNNNNN` in `folder`, rising; empty where there is no such folder."""
    if not folder.is_dir():
        return []
    found = (STEP_NAME.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in found if match)


def committed_step(run_dir: Path) -> int:
    """Step of the newest checkpoint that a run has committed, -1 without one.

    Only a commit gives a folder its final name (checkpoint/commit.py), so the name says it; contents are not verified.
    """
    return max(steps_in(run_dir / "checkpoints"), default=-1)


def fsync_path(path: Path) -> None:
    """Push a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_durably(source: Path, target: Path) -> None:
    """Rename, so that after a crash of the machine the entry stands in exactly one of both folders."""
    os.rename(source, target)
    fsync_path(target.parent)
    if source.parent != target.parent:
        fsync_path(source.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step: temporary file beside it, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    rename_durably(temporary, path)
