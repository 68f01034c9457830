"""Names of the files of a run folder, and how its records are read and written."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import ConfigError
from hpcrl.files import write_durably

CONFIG, FACTS, FINISHED, OWNERS = "config.yaml", "facts.json", "finished.json", "owners"
SLURM = "slurm"
SUBMITTED = f"{SLURM}/submitted.json"
AGENT = "agent"
"""In the folder of an attempt's world, renewed by the agent of rank 0 as long as it watches its ranks."""
OUTCOME = "outcome.json"
"""In the folder of an attempt's world, from the agent of rank 0: the exit code of the run."""
VERDICT = "verdict.json"
"""Beside it, from the controller for its agent: exit code and message of a run that did not end well."""
MOST_PIDS = 1 << 31  # what the system's calls take


def world_folder(run_dir: Path, attempt: int) -> Path:
    """Where the ranks of an attempt meet: endpoint, key, traces, verdict, outcome."""
    return run_dir / "world" / f"attempt_{attempt:04d}"


def record_submission(run_dir: Path, jobs: Sequence[int], cluster: str = "") -> None:
    """Note the jobs that will run the next attempts, in their order, and the name of their cluster."""
    told = {"jobs": list(jobs), "cluster": cluster, "at": now()}
    write_durably(run_dir / SUBMITTED, json.dumps(told).encode())


def submitted_jobs(run_dir: Path) -> list[int]:
    """The jobs of the newest submission; none for a run that was not submitted by hpcrl.launch."""
    path = run_dir / SUBMITTED
    jobs = read_record(path, jobs=list).get("jobs", [])
    if not all(isinstance(job, int) and job > 0 for job in jobs):
        raise damaged(path, f"jobs are numbers above 0, not {jobs}")
    return jobs


def read_owner(run_dir: Path, attempt: int) -> dict[str, Any]:
    """Who holds or held an attempt, and how it ended; empty where the record was made and never written."""
    path = owner_path(run_dir, attempt)
    owner = read_record(path, since=str)
    if "job" in owner:
        owner = read_record(path, job=int, restarts=int)
        if owner["job"] <= 0:
            raise damaged(path, f"job is {owner['job']}")
    if "pid" in owner or not ("job" in owner or "ended" in owner):
        owner = read_record(path, pid=int, host=str, process_start=float)
        if owner and not 0 < owner["pid"] < MOST_PIDS:
            raise damaged(path, f"pid is {owner['pid']}")
    return owner


def read_finished(run_dir: Path) -> dict[str, Any]:
    """What finish_run noted; empty for a run that has not reached its end."""
    return read_record(run_dir / FINISHED, step=int, max_steps=int, reason=str, at=str)


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """What earlier attempts ran on."""
    return read_record(folder / FACTS, attempts=list).get("attempts", [])


def last_end(run_dir: Path) -> dict[str, Any]:
    """What close_run was told about the newest attempt; empty if that one was not closed."""
    attempt = newest_attempt(run_dir)
    owner = read_owner(run_dir, attempt) if attempt else {}
    return owner if "ended" in owner else {}


def finish_run(run_dir: Path, step: int, max_steps: int, reason: str) -> None:
    """Mark the run as done: the same configuration again says so instead of training."""
    write_durably(
        run_dir / FINISHED, json.dumps({"step": step, "max_steps": max_steps, "reason": reason, "at": now()}).encode()
    )


def read_record(path: Path, **needs: type) -> dict[str, Any]:
    """The object in a file of the run folder; empty when there is no file or nothing in it yet.

    ConfigError where it is damaged: no object, or a value that is needed is missing or of another type.
    """
    try:
        text = path.read_text()
        found = json.loads(text) if text else {}
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        for name, kind in needs.items() if found else ():
            if not isinstance(found.get(name), kind):
                raise ValueError(f"{name} is {found.get(name, 'missing')!r}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from error
    return found


def damaged(path: Path, why: object) -> ConfigError:
    """What to raise for a record that cannot be read."""
    return ConfigError([f"{path} cannot be read: {why}; if no job of the run lives, remove it"])


def newest_attempt(folder: Path) -> int:
    """The highest number under owners/, 0 without one."""
    names = (entry.name for entry in (folder / OWNERS).iterdir()) if (folder / OWNERS).is_dir() else ()
    return max((int(name) for name in names if re.fullmatch(r"\d{4,}", name)), default=0)


def owner_path(folder: Path, attempt: int) -> Path:
    """The record of who holds an attempt."""
    return folder / OWNERS / f"{attempt:04d}"


def now() -> str:
    """The time as records have it: UTC, whole seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
