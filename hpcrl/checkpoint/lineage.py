"""The committed lineage: a resumed run moves away what a killed attempt has written after the checkpoint.

Rollouts, metrics and checkpoints are labelled with the number of completed steps, which is also the weight version. A
run that resumes from checkpoint 12 keeps everything up to label 12.
"""

from __future__ import annotations

import json
from pathlib import Path

from hpcrl.checkpoint.commit import set_latest
from hpcrl.metrics.responses import FOLDER as VALIDATION
from hpcrl.system.files import STEP_NAME, rename_durably, step_name, steps_in, write_durably

METRICS = "metrics.jsonl"


def abandon_after(run_dir: Path, step: int, attempt: int) -> list[str]:
    """Move away everything with a label above `step`, which is -1 if the run starts over without a checkpoint. Called
    by rank 0 before anything is written. Returns one line per move, for the log.

    Rollouts, validation responses and metrics move to abandoned/<attempt>/, where `attempt` is the calling attempt.
    Newer checkpoints, which are damaged, are renamed, and the next commit deletes them. After a kill, the next call
    completes the moves.
    """
    # Checkpoints are moved first: if a damaged one became readable again, its rollouts would be needed.
    moved = _abandon_checkpoints(run_dir / "checkpoints", step, attempt)
    target = run_dir / "abandoned" / str(attempt)
    past = [n for n in steps_in(run_dir / "rollouts") if n > step]
    for number in past:
        (target / "rollouts").mkdir(parents=True, exist_ok=True)
        rename_durably(run_dir / "rollouts" / step_name(number), target / "rollouts" / step_name(number))
    if past:
        moved.append(f"rollouts of steps {past[0]} to {past[-1]} moved to {target}")
    if evaluated := _abandon_responses(run_dir, step, target):
        moved.append(f"validation responses of steps {evaluated[0]} to {evaluated[-1]} moved to {target}")
    lines = cut_metrics(run_dir, step, attempt)
    if lines:
        moved.append(f"{lines} lines of {METRICS} {since(step)} moved to {target}")
    return moved


def gaps(run_dir: Path, step: int, rollouts: bool) -> list[str]:
    """Gaps in the history up to `step`, one line each; `rollouts` is whether the run stores rollouts. Called after
    abandon_after(). Rollout files are not opened here, since whoever reads them reports damaged ones."""
    path = run_dir / METRICS
    logged = {_line_step(line) for line in path.read_bytes().splitlines(keepends=True)} if path.is_file() else set()
    found = {METRICS: logged}
    if rollouts:
        stored = steps_in(run_dir / "rollouts")
        found["rollouts/"] = {n for n in stored if any((run_dir / "rollouts" / step_name(n)).glob("rank_*.h5"))}
    lines = []
    for name, steps in found.items():
        if missing := [number for number in range(1, step + 1) if number not in steps]:
            lines.append(f"{run_dir / name} lacks steps {_ranges(missing)} (of {step}): damaged, or removed")
    return lines


def since(step: int) -> str:
    """Text for the steps after a checkpoint; `step` is -1 without one."""
    return f"after step {step}" if step >= 0 else "without a checkpoint"


def _ranges(numbers: list[int]) -> str:
    """`1 to 3, 7` for the ascending steps 1, 2, 3, 7; at most five ranges."""
    known = set(numbers)
    begins, ends = [n for n in numbers if n - 1 not in known], [n for n in numbers if n + 1 not in known]
    parts = [f"{a} to {b}" if a != b else str(a) for a, b in zip(begins, ends, strict=True)]
    return ", ".join(parts[:5]) + (f" and {len(parts) - 5} more" if len(parts) > 5 else "")


def cut_metrics(run_dir: Path, step: int, attempt: int) -> int:
    """Move metrics.jsonl's lines past `step`, and unreadable lines, to abandoned/<attempt>/; returns their number."""
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


def _abandon_responses(run_dir: Path, step: int, target: Path) -> list[int]:
    """Move away the files of responses of later evaluations; returns their steps, ascending."""
    folder = run_dir / VALIDATION
    found = (STEP_NAME.fullmatch(path.stem) for path in folder.glob("*.jsonl"))
    past = sorted(number for match in found if match and (number := int(match[1])) > step)
    for number in past:
        (target / VALIDATION).mkdir(parents=True, exist_ok=True)
        name = f"{step_name(number)}.jsonl"
        rename_durably(folder / name, target / VALIDATION / name)
    return past


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
            moved.append(f"checkpoint {step_name(number)} renamed to {name} until the next commit")
    return moved


def _line_step(line: bytes) -> float:
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")
