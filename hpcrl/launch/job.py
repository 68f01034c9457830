"""Inside a batch script, before and after the step that trains.

python -m hpcrl.launch.job begin WORDS...              checks, makes the run folder, prints what the script reads
python -m hpcrl.launch.job end RUN_DIR ATTEMPT CODE    closes the attempt, requeues the job where it goes on

A chain goes on by its next link, which is in the queue already; where the run does not go on, its links are taken out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hpcrl.cli import in_shell
from hpcrl.cluster import slurm
from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import Config, ConfigError
from hpcrl.exitcodes import SIGNAL_CODES, ExitCode
from hpcrl.files import committed_step, is_storage_error, step_name, write_durably
from hpcrl.launch.prepare import prepare
from hpcrl.launch.render import NOTHING_TO_DO
from hpcrl.rundir import (
    FINISHED,
    OUTCOME,
    SupersededError,
    check_owner,
    close_run,
    last_end,
    open_run,
    read_record,
    stored_config,
    submitted_jobs,
    world_folder,
)
from hpcrl.signals import STOPPING

RESTARTS = "restarts.json"
PATIENCE_S = 600.0
"""How long the end of a job waits for a Slurm controller that is silent: without its word the run would stop."""
CRASHES = (
    ExitCode.RANK_FAILED,
    ExitCode.RANK_KILLED,
    ExitCode.DEADLINE,
    ExitCode.STORE_LOST,
    ExitCode.NOT_SAVED,
)
"""Ends that may not come again; all others than these and REQUEUE would."""
LOOKS = 10
"""How often the batch script looks in vain for a sign of life of the first node's agent before it gives the step up."""
SHORT_LIMIT = 5
"""Jobs in a row whose time was over before a checkpoint: another one of that length would not get there either."""
KILLED_EARLY = {128 + number: SIGNAL_CODES.get(number, ExitCode.REQUEUE) for number in STOPPING}
"""What srun says of an agent that a signal ended before it could handle any, while its imports ran."""
OPENED = "hpcrl: attempt {} in job {}, restart {}"
"""The line with which an attempt begins in its job's log."""
ERROR = re.compile("^hpcrl: |error|fatal|failed|not found|no such", re.IGNORECASE)
CONSEQUENCE = re.compile(r"srun: error: \S+: tasks? [\d,-]+: ")  # how a task ended, which may come before why
LOG_BYTES, CAUSE_CHARS = 1 << 16, 300

Taken = Literal["nodes", "time", "cancelled", ""]
"""What Slurm or a person did to the job: its nodes were taken (a preemption, a lost node, scontrol requeue), its time
is over, somebody cancelled it, or nothing."""


def begin(words: Sequence[str]) -> int:
    """Open the next attempt of the run that the words describe."""
    with contextlib.redirect_stdout(sys.stderr):  # the script reads ours, and a library may print
        config, layout, _, run = prepare(words)
    own = slurm.own_job(os.environ)
    if own is not None and config.resume == "fresh":
        raise ConfigError(["resume: fresh would start over whenever the job is requeued; give another run_dir instead"])
    if own is not None:
        _check_nodes(config, layout, slurm.own_nodes(os.environ))
    why = f"finished: {run.finished['reason']}" if run.kind == "finished" else ""
    if own is not None and own[0] in submitted_jobs(run.run_dir)[1:] and last_end(run.run_dir).get("goes_on") is False:
        why = "the link before this one ended for good"
    if why:
        print(f"hpcrl: {why}", file=sys.stderr)
        _end_chain(run.run_dir)
        return NOTHING_TO_DO
    opened = open_run(config.model_dump(mode="json"), config.run_dir, config.resume)
    job = None
    if own is not None:
        print(OPENED.format(opened.attempt, *own), file=sys.stderr)
        with contextlib.suppress(slurm.SlurmSilent):  # rank 0 asks again
            job = slurm.find_job(own[0])
    end_at = int(job.end) if job is not None and job.end else 0
    print(opened.attempt, end_at, f"{_patience_s(config) / LOOKS:g}", opened.run_dir)
    return ExitCode.DONE


def _patience_s(config: Config) -> float:
    """Seconds after the last sign of life of the first node's agent until the step is given up. The other nodes' agents
    end their ranks within grace_s of its end, by SIGKILL if need be."""
    return config.timeouts.command_s / 2 + 2 * config.timeouts.grace_s + 30.0


def _check_nodes(config: Config, layout: RoleLayout, given: list[int]) -> None:
    """ConfigError where words added by hand ask for other nodes than the script did."""
    wanted = [len(component.nodes) for component in Placement.from_config(config, layout).components]
    if wanted != given:
        sizes = [" + ".join(map(str, nodes)) for nodes in (given, wanted)]
        text = "submit with python -m hpcrl.launch, so that the script asks for the nodes of these words"
        raise ConfigError([f"the job has {sizes[0]} nodes, the layout needs {sizes[1]}; {text}"])


def end(run_dir: Path, attempt: int, step_code: int) -> int:
    """Close the attempt; requeue the job where the run is to go on. Returns the job's exit code."""
    own = slurm.own_job(os.environ)
    outcome = read_record(world_folder(run_dir, attempt) / OUTCOME, code=int)
    # No word from the first node: it was lost, or the step never started.
    code = ExitCode(outcome["code"]) if outcome else None
    job = slurm.insist(lambda: slurm.find_job(own[0]), PATIENCE_S) if own else None
    if code is None and step_code in (ExitCode.BAD_INPUT, ExitCode.NOT_SAVED):  # there was no room for the word
        code = ExitCode(step_code)
    if code is None:
        code = KILLED_EARLY.get(step_code)
    began = world_folder(run_dir, attempt).exists()  # made by the first agent that gets so far
    name = "lost" if code is None and began else "not_started" if code is None else code.name.lower()
    try:
        check_owner(run_dir, attempt)
        try:
            goes_on, why = _goes_on(run_dir, code, _taken(job, own), own)
        except OSError as error:
            if not is_storage_error(error):
                raise
            goes_on, why = False, f"{error}; crashes that cannot be counted would go on for ever: does not go on"
        if code in (None, ExitCode.BAD_INPUT) and not began and own is not None:
            why = f"the step ended with code {step_code} before any agent began: {_cause(attempt, own)}; {why}"
        with contextlib.suppress(OSError):  # who opens the run next asks Slurm for the job instead
            close_run(run_dir, attempt, how=name, goes_on=goes_on, why=why)
    except SupersededError as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        return ExitCode.SUPERSEDED
    print(f"hpcrl: attempt {attempt} ended ({name}): {why}", file=sys.stderr, flush=True)
    if not goes_on:
        _end_chain(run_dir)
    elif own is not None and stored_config(run_dir).cluster.after == "requeue":
        if job is None or job.restarts == own[1]:  # else Slurm has done it
            slurm.insist(lambda: slurm.requeue(own[0]), PATIENCE_S)  # kills this process too
    elif own is not None and [own[0]] == submitted_jobs(run_dir)[-1:]:
        print("hpcrl: this was the last link of the chain; launch again to go on", file=sys.stderr)
    return code if code is not None else ExitCode.RANK_KILLED


def _cause(attempt: int, own: tuple[int, int]) -> str:
    """The line of this job's log that tells best why the step did not start: the first error in it, else the last."""
    log = Path(os.readlink("/proc/self/fd/2"))  # a batch script's output; where it is, only sbatch's words say
    try:
        with log.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - LOG_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:  # it is no file
        return "see the job's log"
    said = text.rpartition(OPENED.format(attempt, *own))[2].splitlines()
    lines = [line.strip() for line in said if line.strip() and not CONSEQUENCE.match(line)]
    errors = [line for line in lines if ERROR.search(line)]
    return (errors or lines[-1:] or ["it said nothing"])[0][:CAUSE_CHARS]


def _end_chain(run_dir: Path) -> None:
    """Nothing is left to do for the jobs that were submitted for this run and still wait."""
    if len(jobs := submitted_jobs(run_dir)) > 1:
        slurm.cancel(jobs, ["PENDING"])


def _taken(job: slurm.Job | None, own: tuple[int, int] | None) -> Taken:
    if job is None or own is None:
        return ""
    if job.preempted or job.restarts > own[1]:
        return "nodes"
    if job.state not in ("COMPLETING", "CANCELLED", "TIMEOUT"):  # the step ended by itself: its batch script runs
        return ""
    return "time" if job.reason == "TimeLimit" else "cancelled"


def _goes_on(run_dir: Path, code: ExitCode | None, taken: Taken, own: tuple[int, int] | None) -> tuple[bool, str]:
    """Whether the run gets another attempt, and why."""
    if (run_dir / FINISHED).exists():
        return False, "the run is finished"
    if taken == "cancelled":
        return False, "the job was cancelled"
    if code is ExitCode.REQUEUE or taken:
        if taken != "nodes" and (short := _count(run_dir, "short", own)) >= SHORT_LIMIT:
            text = f"the time of {short} jobs in a row was over before a new checkpoint: does not go on; "
            return False, text + "raise cluster.time, or lower cluster.signal_lead_s or save_every"
        return True, "goes on from its checkpoint in the next job"
    if code is not None and code not in CRASHES:
        return False, "does not go on by itself"
    limit = stored_config(run_dir).cluster.max_restarts
    crashes = _count(run_dir, "crashes", own)
    if crashes > limit:
        return False, f"crash {crashes} without a new checkpoint, cluster.max_restarts is {limit}: does not go on"
    return True, f"crash {crashes} of at most {limit} without a new checkpoint; goes on in the next job"


def _count(run_dir: Path, kind: Literal["crashes", "short"], own: tuple[int, int] | None) -> int:
    """Add one to the ends of a kind; how many there are now since the newest checkpoint and the last submission."""
    committed = committed_step(run_dir)
    jobs = submitted_jobs(run_dir)
    job = own[0] if own is not None else 0
    since = {
        "checkpoint": step_name(committed) if committed >= 0 else "",
        "submission": jobs[0] if job in jobs else job,  # the links of a chain are one
    }
    told = read_record(run_dir / RESTARTS, checkpoint=str, crashes=int)
    if {name: told.get(name) for name in since} != since:
        told = {"crashes": 0, "short": 0, **since}
    told[kind] += 1
    write_durably(run_dir / RESTARTS, json.dumps(told).encode())
    return told[kind]


def main(argv: Sequence[str]) -> int:
    """Command line."""
    try:
        match argv:
            case ["begin", *words]:
                return begin(words)
            case ["end", run_dir, attempt, code]:
                return end(Path(run_dir), int(attempt), int(code))
    except ConfigError as error:
        print(in_shell("\n".join(error.problems)), file=sys.stderr)
        return ExitCode.BAD_INPUT
    except (slurm.SlurmError, OSError) as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        return ExitCode.FAILED
    print(__doc__)
    return ExitCode.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
