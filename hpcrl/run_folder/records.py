"""File names of a run folder, and reading and writing of its records."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import ConfigError
from hpcrl.system.files import open_regular, write_durably

CONFIG, PLAN, FACTS, FINISHED, OWNERS = "config.yaml", "plan.txt", "facts.json", "finished.json", "owners"
SLURM, LOGS = "slurm", "logs"
SUBMITTED = f"{SLURM}/submitted.json"
REFUSED = f"{SLURM}/refused.json"
AGENT = "agent"
"""In an attempt's world folder: rank 0's agent touches this file while it watches its ranks."""
OUTCOME = "outcome.json"
"""In the same folder: the run's exit code, written by rank 0's agent."""
VERDICT = "verdict.json"
"""In the same folder: exit code and message of a failed run, written by the controller for its agent."""
MAX_PIDS = 1 << 31  # range of pids in system calls


def world_folder(run_dir: Path, attempt: int) -> Path:
    """Rendezvous folder of an attempt's ranks: endpoint, key, traces, verdict, outcome."""
    return run_dir / "world" / f"attempt_{attempt:04d}"


def log_folder(run_dir: Path, attempt: int) -> Path:
    """Folder of an attempt's logs, one per rank and agent."""
    return run_dir / LOGS / f"attempt_{attempt:04d}"


def hang_path(run_dir: Path, attempt: int) -> Path:
    """The report of the hang that ended an attempt, if one did (hpcrl.node.hang_report)."""
    return log_folder(run_dir, attempt) / "hang.txt"


def record_submission(run_dir: Path, jobs: Sequence[int], cluster: str = "") -> None:
    """Record the jobs that will run the next attempts, in order, and the name of their cluster."""
    told = {"jobs": list(jobs), "cluster": cluster, "at": now()}
    write_durably(run_dir / SUBMITTED, json.dumps(told).encode())


def record_refusal(run_dir: Path, job: int, problems: Sequence[str]) -> None:
    """Record that a job, which ends now, refused to start the next attempt."""
    told = {"job": job, "at": now(), "after": newest_attempt(run_dir), "problems": list(problems)}
    write_durably(run_dir / REFUSED, json.dumps(told).encode())


def read_refusal(run_dir: Path) -> dict[str, Any]:
    """The record of record_refusal; empty if an attempt has begun since then, or nothing was refused."""
    told = read_record(run_dir / REFUSED, job=int, at=str, after=int, problems=list)
    return told if told.get("after") == newest_attempt(run_dir) else {}


def submitted_jobs(run_dir: Path) -> list[int]:
    """The jobs of the newest submission; none for a run that was not submitted by hpcrl.launch."""
    path = run_dir / SUBMITTED
    jobs = read_record(path, jobs=list).get("jobs", [])
    if not all(isinstance(job, int) and job > 0 for job in jobs):
        raise damaged(path, f"job ids are numbers above 0, not {jobs}")
    return jobs


def read_owner(run_dir: Path, attempt: int) -> dict[str, Any]:
    """The owner of an attempt, and how it ended; empty if the record was created but never written."""
    path = owner_path(run_dir, attempt)
    owner = read_record(path, since=str)
    if "job" in owner:
        owner = read_record(path, job=int, restarts=int)
        if owner["job"] <= 0:
            raise damaged(path, f"job is {owner['job']}")
    if "pid" in owner or not ("job" in owner or "ended" in owner):
        owner = read_record(path, pid=int, host=str, process_start=float)
        if owner and not 0 < owner["pid"] < MAX_PIDS:
            raise damaged(path, f"pid is {owner['pid']}")
    return owner


def read_finished(run_dir: Path) -> dict[str, Any]:
    """The record of finish_run; empty for an unfinished run."""
    return read_record(run_dir / FINISHED, step=int, max_steps=int, reason=str, at=str)


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """Facts about earlier attempts."""
    return read_record(folder / FACTS, attempts=list).get("attempts", [])


def counted_image_tokens(folder: Path) -> int | None:
    """Tokens of a row's images at most, as the newest attempt's launch counted them; None if it did not, or facts.json
    is damaged."""
    try:
        attempts = read_attempts(folder)
    except ConfigError:
        return None
    found = attempts[-1].get("image_tokens") if attempts else None
    return found if isinstance(found, int) else None


def last_end(run_dir: Path) -> dict[str, Any]:
    """What close_run recorded about the newest attempt; empty if it was not closed."""
    attempt = newest_attempt(run_dir)
    owner = read_owner(run_dir, attempt) if attempt else {}
    return owner if "ended" in owner else {}


def finish_run(run_dir: Path, step: int, max_steps: int, reason: str) -> None:
    """Mark the run as finished; the same configuration then does not train again."""
    write_durably(
        run_dir / FINISHED, json.dumps({"step": step, "max_steps": max_steps, "reason": reason, "at": now()}).encode()
    )


def read_record(path: Path, **needs: type) -> dict[str, Any]:
    """The object in a file of the run folder; empty if the file is missing or empty. ConfigError if the file is not an
    object, or a required value is missing or of another type."""
    try:
        with open_regular(path) as file:
            text = file.read().decode()
        found = json.loads(text) if text else {}
        if not isinstance(found, dict):
            raise ValueError("it contains no object")
        for name, kind in needs.items() if found else ():
            if not isinstance(found.get(name), kind):
                raise ValueError(f"{name} is {found.get(name, 'missing')!r}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from error
    return found


def damaged(path: Path, why: object) -> ConfigError:
    return ConfigError([f"{path} cannot be read: {why}; if no job of the run lives, remove it"])


def newest_attempt(folder: Path) -> int:
    """The highest number under owners/, 0 without one."""
    names = (entry.name for entry in (folder / OWNERS).iterdir()) if (folder / OWNERS).is_dir() else ()
    return max((int(name) for name in names if re.fullmatch(r"\d{4,}", name)), default=0)


def owner_path(folder: Path, attempt: int) -> Path:
    return folder / OWNERS / f"{attempt:04d}"


def now() -> str:
    """The current time in the form of records: UTC, whole seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
