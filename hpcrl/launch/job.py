"""The parts of a batch script before and after the step that trains.

python -m hpcrl.launch.job begin ARGUMENTS...              checks, creates the run folder, prints values for the script;
                                                       from --config FILE in jobs of hpcrl.launch, else composed at the
                                                       first start, from then on as stored in the run folder
python -m hpcrl.launch.job end RUN_DIR ATTEMPT CODE    closes the attempt, requeues the job if the run continues

A chain continues with its next job, which is already queued; if the run does not continue, queued jobs are cancelled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hpcrl.cluster import slurm
from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import Config, ConfigError, read
from hpcrl.launch.frozen import described, run_folder
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from hpcrl.launch.render import NOTHING_TO_DO
from hpcrl.metrics.generated import count_done
from hpcrl.metrics.responses import count_responses
from hpcrl.run_folder import (
    FINISHED,
    OUTCOME,
    SLURM,
    SupersededError,
    check_owner,
    close_run,
    last_end,
    open_run,
    read_record,
    record_refusal,
    stored_config,
    submitted_jobs,
    world_folder,
)
from hpcrl.system.cli import in_shell, use_utf8
from hpcrl.system.exit_codes import ASKED, SIGNAL_CODES, ExitCode
from hpcrl.system.files import committed_step, is_storage_error, step_name, write_durably
from hpcrl.system.log import HEADER, message_of, start
from hpcrl.system.signals import STOPPING

logger = logging.getLogger("hpcrl.launch.job")  # not __name__: a program

RESTARTS = "restarts.json"
PATIENCE_S = 600.0
"""How long `job end` retries an unresponsive Slurm controller; without its answer the job is not requeued."""
CRASHES = (
    ExitCode.RANK_FAILED,
    ExitCode.RANK_KILLED,
    ExitCode.DEADLINE,
    ExitCode.STORE_LOST,
    ExitCode.NOT_SAVED,
)
"""Failures worth a retry; every other failure except REQUEUE would recur."""
LOOKS = 10
"""The batch script kills the step after this many checks without activity of the first node's agent, and after eight
times as many before the agent's first activity."""
SHORT_LIMIT = 5
"""Maximum jobs in a row that ended before a checkpoint: another job of this length would not reach one either."""
KILLED_EARLY = {128 + number: SIGNAL_CODES.get(number, ExitCode.REQUEUE) for number in STOPPING}
"""srun's exit code if a signal ended an agent during its imports, before it handled signals -> the run's exit code."""
OPENED = "attempt {} in job {}, restart {}"
"""The first line of an attempt in its job's log."""
ERROR = re.compile("^hpcrl: |error|fatal|failed|not found|no such", re.IGNORECASE)
CONSEQUENCE = re.compile(r"srun: error: \S+: tasks? [\d,-]+: ")  # how a task ended; the cause may come later
LOG_BYTES, CAUSE_CHARS = 1 << 16, 300

Taken = Literal["nodes", "time", "cancelled", ""]
"""What ended the job: nodes taken (preemption, lost node, scontrol requeue), time limit, cancelled, none of these."""


def begin(arguments: Sequence[str]) -> int:
    """Open the next attempt of the run described by the arguments; a refusal is recorded in its folder."""
    try:
        return _begin(arguments)
    except ConfigError as error:
        own, folder = slurm.own_job(os.environ), run_folder(read(arguments))
        if own is not None and (folder / SLURM).is_dir():
            with contextlib.suppress(OSError):
                record_refusal(folder, own[0], error.problems)
        raise


def _begin(arguments: Sequence[str]) -> int:
    with contextlib.redirect_stdout(sys.stderr):  # the script reads our output, and a library may print too
        config, layout, model, run, shown = prepare(arguments)
    own = slurm.own_job(os.environ)
    if own is not None and config.resume == "fresh":
        raise ConfigError(["resume: fresh would start over at every requeue of the job; give another run_dir instead"])
    if own is not None:
        _check_nodes(config, layout, slurm.own_nodes(os.environ))
    why = f"finished: {run.finished['reason']}" if run.kind == "finished" else ""
    if own is not None and own[0] in submitted_jobs(run.run_dir)[1:] and last_end(run.run_dir).get("goes_on") is False:
        why = "the previous job of the chain ended for good"
    if why:
        logger.info(why)
        _end_chain(run.run_dir)
        return NOTHING_TO_DO
    plan = describe(config, layout, model, run, shown)
    said = [f"resume_from: {run.lineage}"] if run.lineage else []
    said += [f"changed: {', '.join(run.changes)}"] if run.changes else []
    for line in (*said, *described(run.ignored, config.model_dump(mode="json"))):
        logger.info("%s", line)
    given = (config.run_dir, config.resume, plan, run.arguments, shown.image_tokens)
    opened = open_run(config.model_dump(mode="json"), *given)
    job = None
    if own is not None:
        logger.info(OPENED.format(opened.attempt, *own))
        with contextlib.suppress(slurm.SlurmSilent):  # rank 0 checks again
            job = slurm.find_job(own[0])
    end_at = int(job.end) if job is not None and job.end else 0
    print(opened.attempt, end_at, f"{_patience_s(config) / LOOKS:g}", opened.run_dir)
    return ExitCode.DONE


def _patience_s(config: Config) -> float:
    """Seconds after the last activity of the first node's agent until the step is killed. Within grace_s after that
    agent's end, the agents of other nodes end their ranks, with SIGKILL if necessary."""
    return config.timeouts.command_s / 2 + 2 * config.timeouts.grace_s + 30.0


def _check_nodes(config: Config, layout: RoleLayout, given: list[int]) -> None:
    """ConfigError if arguments added by hand need different nodes than the script requested."""
    wanted = [len(component.nodes) for component in Placement.from_config(config, layout).components]
    if wanted != given:
        sizes = [" + ".join(map(str, nodes)) for nodes in (given, wanted)]
        text = "submit with python -m hpcrl.launch, whose script requests the nodes for these arguments"
        raise ConfigError([f"the job has {sizes[0]} nodes, the layout needs {sizes[1]}; {text}"])


def end(run_dir: Path, attempt: int, step_code: int) -> int:
    """Close the attempt; requeue the job if the run continues. Returns the job's exit code."""
    own = slurm.own_job(os.environ)
    outcome = read_record(world_folder(run_dir, attempt) / OUTCOME, code=int)
    # No report from the first node: it was lost, or the step never started.
    code = ExitCode(outcome["code"]) if outcome else None
    job = slurm.insist(lambda: slurm.find_job(own[0]), PATIENCE_S) if own else None
    if code is None and step_code in (ExitCode.BAD_INPUT, ExitCode.NOT_SAVED):  # no disk space for the report
        code = ExitCode(step_code)
    if code is None:
        code = KILLED_EARLY.get(step_code)
    began = world_folder(run_dir, attempt).exists()  # the first agent to start creates it
    name = "lost" if code is None and began else "not_started" if code is None else code.name.lower()
    taken = _taken(job, own)
    try:
        check_owner(run_dir, attempt)
        try:
            goes_on, why = _goes_on(run_dir, code, taken, own)
        except OSError as error:
            if not is_storage_error(error):
                raise
            goes_on, why = False, f"{error}; crashes cannot be counted and could repeat forever: does not resume"
        if code in (None, ExitCode.BAD_INPUT) and not began and own is not None:
            why = f"the step ended with code {step_code} before any agent started: {_cause(attempt, own)}; {why}"
        by: str = "preempted" if job is not None and job.preempted else taken
        with contextlib.suppress(OSError):  # the next launch queries Slurm about the job instead
            close_run(run_dir, attempt, how=name, goes_on=goes_on, why=why, **({"by": by} if by else {}))
    except SupersededError as error:
        logger.error("%s", error)
        return ExitCode.SUPERSEDED
    fails = code not in (ExitCode.DONE, *ASKED)
    logger.log(logging.ERROR if fails else logging.INFO, "attempt %d ended (%s): %s", attempt, name, why)
    if not goes_on:
        _end_chain(run_dir)
    elif own is not None and stored_config(run_dir).cluster.after == "requeue":
        if job is None or job.restarts == own[1]:  # otherwise Slurm has requeued it
            slurm.insist(lambda: slurm.requeue(own[0]), PATIENCE_S)  # also kills this process
    elif own is not None and [own[0]] == submitted_jobs(run_dir)[-1:]:
        logger.warning("this was the last job of the chain; launch again to continue")
    return code if code is not None else ExitCode.RANK_KILLED


def _cause(attempt: int, own: tuple[int, int]) -> str:
    """The line of this job's log that best explains why the step did not start: the first error, else the last line."""
    log = Path(os.readlink("/proc/self/fd/2"))  # the batch script's output; only sbatch's options name its path
    try:
        with log.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - LOG_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:  # not a file
        return "see the job's log"
    said = text.rpartition(OPENED.format(attempt, *own))[2].splitlines()
    lines = [line.strip() for line in said if line.strip() and not CONSEQUENCE.match(line)]
    errors = [line for line in lines if _is_error(line)]
    return message_of((errors or lines[-1:] or ["the log is empty"])[0])[:CAUSE_CHARS]


def _is_error(line: str) -> bool:
    header = HEADER.match(line)
    return header["level"] != "INFO" if header else bool(ERROR.search(line))


def _end_chain(run_dir: Path) -> None:
    """Cancel this run's pending jobs, since the run has ended."""
    if len(jobs := submitted_jobs(run_dir)) > 1:
        slurm.cancel(jobs, ["PENDING"])


def _taken(job: slurm.Job | None, own: tuple[int, int] | None) -> Taken:
    if job is None or own is None:
        return ""
    if job.preempted or job.restarts > own[1]:
        return "nodes"
    if job.state not in ("COMPLETING", "CANCELLED", "TIMEOUT"):  # the step ended by itself: its batch script still runs
        return ""
    return "time" if job.reason == "TimeLimit" else "cancelled"


def _goes_on(run_dir: Path, code: ExitCode | None, taken: Taken, own: tuple[int, int] | None) -> tuple[bool, str]:
    """Whether the run gets another attempt, and the reason."""
    if (run_dir / FINISHED).exists():
        return False, "the run is finished"
    if taken == "cancelled":
        return False, "the job was cancelled"
    if code is ExitCode.REQUEUE or taken:
        if taken != "nodes" and (short := _count(run_dir, "short", own)) >= SHORT_LIMIT:
            text = f"{short} jobs in a row ended before a new checkpoint: does not resume; "
            return False, text + "raise cluster.time, or lower cluster.signal_lead_s or save_every"
        return True, "resumes from its checkpoint in the next job"
    if code is not None and code not in CRASHES:
        return False, "does not resume by itself"
    limit = stored_config(run_dir).cluster.max_restarts
    crashes = _count(run_dir, "crashes", own)
    if crashes > limit:
        return False, f"crash {crashes} without a new checkpoint, cluster.max_restarts is {limit}: does not resume"
    return True, f"crash {crashes} of at most {limit} without a new checkpoint; resumes in the next job"


def _stored(run_dir: Path) -> int:
    """The responses, or the prompts with rows, that a run without trainers has stored."""
    return count_done(run_dir) or count_responses(run_dir)


def _count(run_dir: Path, kind: Literal["crashes", "short"], own: tuple[int, int] | None) -> int:
    """Increment the count of this kind of end; returns it (since the newest checkpoint and last submission)."""
    committed = committed_step(run_dir)
    jobs = submitted_jobs(run_dir)
    job = own[0] if own is not None else 0
    stored = _stored(run_dir) if committed < 0 and not stored_config(run_dir).pipeline_spec.trains else 0
    since = {
        "checkpoint": step_name(committed) if committed >= 0 else f"{stored} responses" if stored else "",
        "submission": jobs[0] if job in jobs else job,  # the jobs of a chain count as one submission
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
            case ["begin", *arguments]:
                return begin(arguments)
            case ["end", run_dir, attempt, code]:
                return end(Path(run_dir), int(attempt), int(code))
    except ConfigError as error:
        logger.error("%s", in_shell("\n".join(error.problems)))
        return ExitCode.BAD_INPUT
    except (slurm.SlurmError, OSError) as error:
        logger.error("%s", error)
        return ExitCode.FAILED
    print(in_shell(__doc__))
    return ExitCode.BAD_INPUT


if __name__ == "__main__":
    use_utf8()
    start("launch", console="stderr")
    sys.exit(main(sys.argv[1:]))
