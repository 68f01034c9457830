"""The run folder that explains itself and has one owner. Imports no torch.

    config.yaml   the effective configuration        facts.json   versions, host and start of every attempt
    owners/NNNN   who holds attempt NNNN             finished.json   made when the run reached its end

The same configuration again resumes; another one is refused with the difference. An attempt is owned by the process
that opened the run, or the Slurm job it is in: its record is made with O_EXCL under the number after the one that was
found ended or dead, so of two launches that find it so one gets through. Whether a job lives is asked of Slurm. The
owner is whoever has the highest number; check_owner asks again before every commit, so a superseded attempt commits
nothing. A job that was submitted for the run and still waits holds it too (slurm/submitted.json).
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from hpcrl.cluster import slurm
from hpcrl.config import Config, ConfigError, parse
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

DIVISION = (
    "trainer.megatron",
    "trainer.max_tokens_per_micro_batch",
    "trainer.activation_checkpointing",
    "trainer.cpu_offload",
    "trainer.logits_chunk_tokens",
    "generator.max_slots",
    "generator.burst_tokens",
    "generator.kv_bucket",
)
"""Keys that cut the work up for the memory of a rank: other values round numbers differently."""

MAY_CHANGE = (
    "max_steps",
    "save_every",
    "eval_every",
    "keep_checkpoints",
    "resume",
    "dry_run",
    "run_name",
    "run_dir",
    "timeouts",
    "cluster",
    "layout",
    *DIVISION,
)
"""Keys (with all below them) that may differ between attempts: they change how long and where a run goes on, not what
it computes. max_steps also stretches a cosine or linear lr schedule: from there on it follows the new length."""

PACKAGES = ("hpcrl", "torch", "transformers", "tokenizers", "safetensors", "numpy", "h5py", "msgspec", "pydantic")
MOST_PIDS = 1 << 31  # what the system's calls take
SAME_START_S = 2.0  # a process start read twice differs by less, also when the clock is stepped in between


@dataclass(frozen=True)
class RunState:
    """A run folder as found.

    attempt: the number this process owns, from open_run; the newest so far, 0 without one, from check_run.
    changes: permitted differences to the stored configuration, `key: old -> new`.
    finished: content of finished.json when kind is finished.
    """

    run_dir: Path
    kind: Literal["fresh", "resume", "finished"]
    attempt: int = 0
    changes: list[str] = field(default_factory=list)
    finished: dict[str, Any] = field(default_factory=dict)


class SupersededError(RuntimeError):
    """Another attempt has taken the run over."""


def check_run(config: Mapping[str, Any], run_dir: str | Path, resume: str) -> RunState:
    """What open_run would find, without writing anything: for a dry run and for validation.

    ConfigError, one line each: the folder cannot be used or holds no run, another configuration, another live owner.
    """
    folder = _fresh_name(Path(run_dir).absolute()) if resume == "fresh" else Path(run_dir).absolute()
    _check_place(folder)
    if not (folder / CONFIG).exists():
        return RunState(folder, "fresh", _check_free(folder))
    _attempts(folder)  # the job will add one
    changes = _differences(*_complete(_stored_config(folder), _effective(config, folder)))
    refused = [line for key, line in changes if not any(f"{key}.".startswith(f"{free}.") for free in MAY_CHANGE)]
    if refused:
        head = f"{folder} holds a run of another configuration; use its values, another run_name, or resume=fresh:"
        raise ConfigError([head, *(f"  {line}" for line in refused)])
    permitted = [line for _, line in changes]
    finished = read_finished(folder)
    if finished and int(config.get("max_steps", 0)) <= finished["max_steps"]:
        return RunState(folder, "finished", _newest_attempt(folder), permitted, finished)
    return RunState(folder, "resume", _check_free(folder), permitted)


def open_run(config: Mapping[str, Any], run_dir: str | Path, resume: str) -> RunState:
    """Make or reopen the run folder and own it until close_run or the end of this process.

    A finished run is returned as it is, not owned. Afterwards config.yaml and facts.json describe this attempt. The
    folder to use is the returned run_dir (`resume=fresh` gives `NAME-2`, `NAME-3`, ... where NAME exists). ConfigError
    as in check_run, also when another launch was faster.
    """
    while True:
        found = check_run(config, run_dir, resume)
        if found.kind == "finished":
            return found
        opened = replace(found, attempt=found.attempt + 1)
        try:
            if _claim(opened, lasts=config.get("cluster", {}).get("name", "local") == "local"):
                _describe(config, opened)
                return opened
        except OSError as error:
            raise ConfigError([f"run folder {found.run_dir} cannot be written: {error}"]) from error


def stored_config(run_dir: Path) -> Config:
    """The configuration of a run folder. ConfigError where it is damaged or another version's."""
    stored = _stored_config(run_dir)
    try:
        return parse(stored)
    except ConfigError as error:
        raise ConfigError([f"{run_dir / CONFIG}: {line}" for line in error.problems]) from error


def world_folder(run_dir: Path, attempt: int) -> Path:
    """Where the ranks of an attempt meet: endpoint, key, traces, verdict, outcome."""
    return run_dir / "world" / f"attempt_{attempt:04d}"


def record_submission(run_dir: Path, jobs: Sequence[int], cluster: str = "") -> None:
    """Note the jobs that will run the next attempts, in their order, and the name of their cluster."""
    told = {"jobs": list(jobs), "cluster": cluster, "at": _now()}
    write_durably(run_dir / SUBMITTED, json.dumps(told).encode())


def submitted_jobs(run_dir: Path) -> list[int]:
    """The jobs of the newest submission; none for a run that was not submitted by hpcrl.launch."""
    path = run_dir / SUBMITTED
    jobs = read_record(path, jobs=list).get("jobs", [])
    if not all(isinstance(job, int) and job > 0 for job in jobs):
        raise _damaged(path, f"jobs are numbers above 0, not {jobs}")
    return jobs


def read_owner(run_dir: Path, attempt: int) -> dict[str, Any]:
    """Who holds or held an attempt, and how it ended; empty where the record was made and never written."""
    path = _record(run_dir, attempt)
    owner = read_record(path, since=str)
    if "job" in owner:
        owner = read_record(path, job=int, restarts=int)
        if owner["job"] <= 0:
            raise _damaged(path, f"job is {owner['job']}")
    if "pid" in owner or not ("job" in owner or "ended" in owner):
        owner = read_record(path, pid=int, host=str, process_start=float)
        if owner and not 0 < owner["pid"] < MOST_PIDS:
            raise _damaged(path, f"pid is {owner['pid']}")
    return owner


def lives_as_job(owner: Mapping[str, Any]) -> bool:
    """Whether Slurm is to be asked for a run's owner: not where it is a process in a job, and that can be looked at."""
    return "job" in owner and not ("pid" in owner and ("ended" in owner or owner["host"] == platform.node()))


def read_finished(run_dir: Path) -> dict[str, Any]:
    """What finish_run noted; empty for a run that has not reached its end."""
    return read_record(run_dir / FINISHED, step=int, max_steps=int, reason=str, at=str)


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
        raise _damaged(path, error) from error
    return found


def _damaged(path: Path, why: object) -> ConfigError:
    return ConfigError([f"{path} cannot be read: {why}; if no job of the run lives, remove it"])


def last_end(run_dir: Path) -> dict[str, Any]:
    """What close_run was told about the newest attempt; empty if that one was not closed."""
    attempt = _newest_attempt(run_dir)
    owner = read_owner(run_dir, attempt) if attempt else {}
    return owner if "ended" in owner else {}


def finish_run(run_dir: Path, step: int, max_steps: int, reason: str) -> None:
    """Mark the run as done: the same configuration again says so instead of training."""
    write_durably(
        run_dir / FINISHED, json.dumps({"step": step, "max_steps": max_steps, "reason": reason, "at": _now()}).encode()
    )


def close_run(run_dir: Path, attempt: int, **told: Any) -> None:
    """Give the run up, so that the next launch need not ask whether its owner lives. `told`: how it ended."""
    check_owner(run_dir, attempt)
    owner = read_owner(run_dir, attempt)
    write_durably(_record(run_dir, attempt), json.dumps(owner | {"ended": _now(), **told}).encode())


def check_owner(run_dir: Path, attempt: int) -> None:
    """Raise SupersededError unless `attempt` still owns the run; any process of the attempt may ask."""
    newest = _newest_attempt(run_dir)
    if newest != attempt:
        raise SupersededError(f"attempt {attempt} of {run_dir} may not commit: attempt {newest} has taken the run over")


def _check_place(folder: Path) -> None:
    """The folder is a run, empty, or can be made."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    except OSError as error:
        raise ConfigError([f"run folder {folder} cannot be made: {error.strerror}"]) from error
    if not existing.is_dir():
        raise ConfigError([f"run folder {folder} cannot be made: {existing} is not a folder"])
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError([f"run folder {folder} cannot be written: no permission in {existing}"])
    longest = os.pathconf(existing, "PC_NAME_MAX")
    if name := next((part for part in folder.parts if len(os.fsencode(part)) > longest), ""):
        raise ConfigError([f"run folder {folder} cannot be made: a name has {len(name)} characters, {longest} may be"])
    if existing == folder and not (folder / CONFIG).exists():
        own = (SLURM, OWNERS, FACTS, f".{FACTS}.tmp", f".{CONFIG}.tmp")  # killed before config.yaml stood there
        foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in own)
        if foreign:
            shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise ConfigError([f"{folder} is not a run folder: no {CONFIG}, but {shown}; choose another run_dir"])


def _fresh_name(folder: Path) -> Path:
    """The folder itself where it does not exist, else the first free of NAME-2, NAME-3, ..."""
    number, free = 1, folder
    while free.exists() and any(free.iterdir() if free.is_dir() else [free]):
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _claim(run: RunState, lasts: bool) -> bool:
    """Make the record of the attempt; False when another launch was faster.

    `lasts`: this process is there as long as the run, so its end is the run's, also where the job it is in goes on.
    """
    (run.run_dir / OWNERS).mkdir(parents=True, exist_ok=True)
    own, process = slurm.own_job(os.environ), psutil.Process()
    owner: dict[str, Any] = {"since": _now(), "host": platform.node()}
    if own is not None:
        owner |= {"job": own[0], "restarts": own[1], "cluster": os.environ.get("SLURM_CLUSTER_NAME", "")}
    if own is None or lasts:
        owner |= {"pid": process.pid, "process_start": process.create_time()}
    try:
        descriptor = os.open(_record(run.run_dir, run.attempt), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file:
        file.write(json.dumps(owner).encode())
        file.flush()
        os.fsync(file.fileno())
    return True


def _describe(config: Mapping[str, Any], run: RunState) -> None:
    """Let config.yaml and facts.json tell of the attempt that begins."""
    folder = run.run_dir
    attempts = _attempts(folder)
    attempts.append({"attempt": run.attempt, "kind": run.kind, "changes": run.changes, **_facts()})
    write_durably(folder / FACTS, json.dumps({"attempts": attempts}, indent=1).encode())
    write_durably(folder / CONFIG, yaml.safe_dump(_effective(config, folder), sort_keys=False).encode())
    (folder / FINISHED).unlink(missing_ok=True)


def _check_free(folder: Path) -> int:
    """The newest attempt, 0 without one; ConfigError naming its owner if that may still run."""
    jobs, own = submitted_jobs(folder), slurm.own_job(os.environ)
    for job in [] if own is not None and own[0] in jobs else jobs:  # this job may be a link of the chain
        cluster = read_record(folder / SUBMITTED).get("cluster", "")
        _check_job_gone(f"{folder} belongs to job {job}", folder / SUBMITTED, job, -1, cluster)
    attempt = _newest_attempt(folder)
    if not attempt:
        return 0
    path = _record(folder, attempt)
    deadline = time.monotonic() + 1.0
    while not (owner := read_owner(folder, attempt)) and time.monotonic() < deadline:
        time.sleep(0.02)  # made, not yet written
    # One that stays empty died right there; were it only stopped, its number is no longer the highest when it goes on.
    if not owner or "ended" in owner:
        return attempt
    if lives_as_job(owner):
        held = f"{folder} is held by job {owner['job']} since {owner['since']} (attempt {attempt})"
        _check_job_gone(held, path, owner["job"], owner["restarts"], owner.get("cluster", ""))
        return attempt
    held = f"{folder} is held by pid {owner['pid']} on host {owner['host']} since {owner['since']} (attempt {attempt})"
    if owner["host"] != platform.node():
        raise ConfigError([f"{held}; if that process is gone, remove {path}"])
    if process_lives(owner["pid"], owner["process_start"]):
        raise ConfigError([f"{held}; wait for it, stop it, or use another run_name"])
    return attempt


def _check_job_gone(held: str, record: Path, number: int, restarts: int, cluster: str) -> None:
    """ConfigError if the job may still run, or will. This very job, if it was requeued since, may take over.

    `cluster`: of the job, empty where it is not known. Another one's jobs cannot be asked for here."""
    if (own := slurm.own_job(os.environ)) is not None and own[0] == number and own[1] > restarts:
        return
    try:
        here = slurm.cluster_name() if cluster else ""
        if here != cluster:
            raise ConfigError(
                [f"{held}, on cluster {cluster}, and this is {here}; if it is gone there, remove {record}"]
            )
        job = slurm.find_job(number)
    except slurm.SlurmError as error:
        raise ConfigError(
            [f"{held}, and Slurm cannot say whether it lives: {error}; if not, remove {record}"]
        ) from error
    if job is not None and job.lives:
        state = job.state.lower()
        way_out = f"wait for it, scancel {number}" if state != "completing" else "it has all but ended: wait a moment"
        if job.held:
            state, way_out = f"held ({job.reason})", f"scontrol release {number}, scancel {number}"
        raise ConfigError([f"{held}, which is {state}; {way_out}, or use another run_name"])


def process_lives(pid: int, start: float) -> bool:
    """Whether the very process with this pid and start still runs; a pid alone may have been given out again."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - start) < SAME_START_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _newest_attempt(folder: Path) -> int:
    names = (entry.name for entry in (folder / OWNERS).iterdir()) if (folder / OWNERS).is_dir() else ()
    return max((int(name) for name in names if re.fullmatch(r"\d{4,}", name)), default=0)


def _record(folder: Path, attempt: int) -> Path:
    return folder / OWNERS / f"{attempt:04d}"


def _attempts(folder: Path) -> list[dict[str, Any]]:
    """What earlier attempts ran on."""
    return read_record(folder / FACTS, attempts=list).get("attempts", [])


def _stored_config(folder: Path) -> dict[str, Any]:
    try:
        stored = yaml.safe_load((folder / CONFIG).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"{folder / CONFIG} cannot be read: {' '.join(str(error).split())}"]) from error
    if not isinstance(stored, dict):
        raise ConfigError([f"{folder / CONFIG} holds no configuration; {folder} is not a run folder of hpcrl"])
    return stored


def _effective(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration as it reads after being stored (tuples become lists), with the folder it is used in."""
    return yaml.safe_load(yaml.safe_dump(dict(config), sort_keys=False)) | {"run_dir": str(folder)}


def _complete(old: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """With the keys that the version which stored the old one had not; as they are where it had others."""
    try:
        return parse(old).model_dump(mode="json"), parse(new).model_dump(mode="json")
    except ConfigError:
        return old, new


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(key, `key: old -> new`) of every leaf that differs, in the order of the new configuration."""
    before, after = dict(_leaves(old, "")), dict(_leaves(new, ""))
    changed = (key for key in after | before if before.get(key, _ABSENT) != after.get(key, _ABSENT))
    return [(key, f"{key}: {_show(before, key)} -> {_show(after, key)}") for key in changed]


_ABSENT = object()


def _show(leaves: Mapping[str, Any], key: str) -> str:
    return json.dumps(leaves[key], default=str) if key in leaves else "(not set)"


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _facts() -> dict[str, Any]:
    """What this attempt runs on."""
    return {
        "start": _now(),
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "num_cpus": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "git_commit": _git_commit(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """Commit of the source tree hpcrl runs from, with `+changes` where files differ; None for an installed package."""
    source = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(source), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = git("rev-parse", "HEAD")
    return commit and commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no", ".") else "")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
