"""The committed lineage: on resume, what a killed attempt did past its checkpoint is set aside, not mixed in.

Rollouts, metrics and checkpoints are labelled with the number of steps done once they exist: after `step_000012` of all
three, the weights have version 12. A run that resumes at checkpoint 12 keeps everything up to label 12.
"""

from __future__ import annotations

import json
from pathlib import Path

from hpcrl.checkpoint.commit import set_latest
from hpcrl.files import rename_durably, step_name, steps_in, write_durably

METRICS = "metrics.jsonl"


def abandon_after(run_dir: Path, step: int, attempt: int) -> list[str]:
    """Set aside everything labelled with a later step than `step`; -1 when the run starts over without a checkpoint.

    Rollouts and metrics move to abandoned/<attempt>/, named after the attempt that calls this. Checkpoints (only
    damaged ones can be newer) are renamed and go with the next commit's pruning. Killed at any point, the next call
    finishes. Called by rank 0 before anything is written. Returns what was moved, one line each, for the log.
    """
    # Checkpoints first: were one of them readable again next time, its rollouts would have to be there still.
    moved = _abandon_checkpoints(run_dir / "checkpoints", step, attempt)
    target = run_dir / "abandoned" / str(attempt)
    past = [n for n in steps_in(run_dir / "rollouts") if n > step]
    for number in past:
        (target / "rollouts").mkdir(parents=True, exist_ok=True)
        rename_durably(run_dir / "rollouts" / step_name(number), target / "rollouts" / step_name(number))
    if past:
        moved.append(f"rollouts of steps {past[0]} to {past[-1]} moved to {target}")
    lines = cut_metrics(run_dir, step, attempt)
    if lines:
        moved.append(f"{lines} lines of {METRICS} past step {step} moved to {target}")
    return moved


def cut_metrics(run_dir: Path, step: int, attempt: int) -> int:
    """Move lines of metrics.jsonl past `step` to abandoned/<attempt>/, after those there; lines that cannot be read
    (torn by a kill) go too. Returns how many went."""
    path, target = run_dir / METRICS, run_dir / "abandoned" / str(attempt) / METRICS
    if not path.is_file():
        return 0
    kept: list[bytes] = []
    cut: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        (kept if _line_step(line) <= step else cut).append(line)
    if cut:
        target.parent.mkdir(parents=True, exist_ok=True)
        before = target.read_bytes() if target.is_file() else b""
        write_durably(target, before + b"".join(cut))
        write_durably(path, b"".join(kept))
    return len(cut)


def _abandon_checkpoints(root: Path, step: int, attempt: int) -> list[str]:
    steps = steps_in(root)
    if not steps or steps[-1] <= step:
        return []
    if step in steps:
        set_latest(root, step)
    moved = []
    for number in steps:
        if number > step:
            name = f"{step_name(number)}.abandoned-{attempt}"
            rename_durably(root / step_name(number), root / name)
            moved.append(f"checkpoint {step_name(number)} set aside as {name} until the next commit")
    return moved


def _line_step(line: bytes) -> float:
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
