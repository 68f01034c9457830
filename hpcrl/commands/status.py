"""Status of a run: state, nodes, progress, time left, checkpoints, restarts, errors.

    python -m hpcrl status [RUN|JOBID]      a run's folder, its name in runs/, or a job; default: all in runs/

Everything except the job's state is read from the run folder, so the command works during the run, after its end, and
even if Slurm no longer lists the job or has no accounting. It writes nothing and does not import torch.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpcrl.checkpoint.best import read_best
from hpcrl.cluster import slurm
from hpcrl.cluster.accounting import Accounting
from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import Config, ConfigError
from hpcrl.metrics.duration import duration
from hpcrl.metrics.evaluated import SUMMARY, scores_in_short
from hpcrl.metrics.generated import count_done
from hpcrl.metrics.log import METRICS, read_metrics
from hpcrl.metrics.progress import RECENT_STEPS, SHOWN, TRAINED, evaluations_left
from hpcrl.metrics.responses import count_responses
from hpcrl.node.preflight import read_judgement, read_reports
from hpcrl.report.hours_text import in_short
from hpcrl.report.run_files import NOT_ASKED, RunFiles
from hpcrl.report.run_hours import accounting_of, run_hours
from hpcrl.run_folder import (
    CONFIG,
    OWNERS,
    SLURM,
    SUBMITTED,
    VERDICT,
    branches_of,
    hang_path,
    lives_as_job,
    process_lives,
    read_finished,
    read_owner,
    read_record,
    read_refusal,
    stored_config,
    submitted_jobs,
    world_folder,
)
from hpcrl.run_folder.changes import read_config
from hpcrl.run_folder.records import read_attempts
from hpcrl.run_folder.user_errors import ERRORS, read_errors
from hpcrl.system.cli import in_shell, show, use_utf8
from hpcrl.system.exit_codes import ASKED, ExitCode
from hpcrl.system.files import committed_step, step_name

RUNS = Path("runs")
SHOWN_NODES, SHOWN_RESTARTS, SHOWN_ERRORS = 8, 5, 3
STALLED = 10  # usual step times without a new step
STALLED_S = 60.0  # minimum of that time
NEWEST_BYTES = 8 << 20  # of metrics.jsonl, thousands of rows: a long run's file is not read whole


@dataclass(frozen=True)
class RunFolder:
    """The content of a run folder, read on access."""

    folder: Path

    @cached_property
    def values(self) -> dict[str, Any]:
        """The stored configuration, unchecked; empty if no attempt has begun."""
        return read_config(self.folder) if (self.folder / CONFIG).exists() else {}

    @cached_property
    def _checked(self) -> tuple[Config | None, str]:
        try:
            return stored_config(self.folder) if self.values else None, ""
        except ConfigError as error:
            return None, error.problems[0]

    @property
    def config(self) -> Config | None:
        """The stored configuration, checked; None if no attempt has begun, or if it cannot be checked here."""
        return self._checked[0]

    @property
    def obstacle(self) -> str:
        """Why the stored configuration cannot be checked here, such as a missing package of a part; else empty."""
        return self._checked[1]

    @property
    def steps(self) -> Any:
        """The last planned step; ? if unknown."""
        return self.values.get("max_steps", "?")

    @cached_property
    def owners(self) -> dict[int, dict[str, Any]]:
        """Attempt -> its owner and how it ended."""
        found = sorted((self.folder / OWNERS).glob("[0-9]*"))
        return {int(path.name): read_owner(self.folder, int(path.name)) for path in found if path.name.isdigit()}

    @property
    def attempt(self) -> int:
        return max(self.owners, default=0)

    @property
    def owner(self) -> dict[str, Any]:
        return self.owners.get(self.attempt, {})

    @property
    def began(self) -> float | None:
        """Start of the newest attempt, seconds since the epoch."""
        with contextlib.suppress(KeyError, ValueError):
            return datetime.datetime.fromisoformat(self.owner["since"]).timestamp()
        return None

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The newest rows of metrics."""
        return read_metrics(self.folder, NEWEST_BYTES)

    @property
    def step(self) -> int:
        return self.rows[-1]["step"] if self.rows else max(committed_step(self.folder), 0)

    @property
    def finished(self) -> dict[str, Any]:
        return read_finished(self.folder)

    @cached_property
    def step_s(self) -> float | None:
        """Seconds per step without evaluations, over the last steps."""
        times = [
            row["time/step_total"] for row in self.rows[-RECENT_STEPS:] if row["step"] and row.get("time/step_total")
        ]
        return sum(times) / len(times) if times else None

    def seconds_left(self) -> float | None:
        """Seconds until the last step, at the rate of recent steps."""
        if self.step_s is None or self.config is None:
            return None
        config = self.config
        every = config.eval_every if config.evaluates or config.validates_rows else 0
        evaluations = evaluations_left(self.step, config.max_steps, every)
        evaluation_s = next((row[key] for row in reversed(self.rows) if row.get(key := "time/val_step")), 0.0)
        return (config.max_steps - self.step) * self.step_s + evaluations * evaluation_s

    def newest(self, name: str) -> tuple[int, float] | None:
        """(step, value) of the last logged value of a metric."""
        return next(((row["step"], row[name]) for row in reversed(self.rows) if row.get(name) is not None), None)


def describe(run_dir: Path, job: slurm.Job | None, now: float, accounting: Accounting = NOT_ASKED) -> str:
    """The run as lines of `label  text`. `job` is from Slurm or its accounting, None if neither lists one; `accounting`
    has the hours of its jobs, if it was asked."""
    run = RunFolder(run_dir)
    config = run.config
    name, pipeline = (run.values.get(key) for key in ("run_name", "pipeline"))
    what = f"{name or run_dir.name} ({pipeline})" if pipeline else run_dir.name
    rows = [("run", f"{what}, folder {run_dir}"), ("state", state(run, job))]
    runs = _runs(run, job)
    if config is not None:
        rows += _where(run, config)
    if config is not None and config.writes_responses:
        rows.append(("done", f"{count_done(run_dir)} prompts have their rows"))
    elif config is not None and not config.pipeline_spec.trains:
        rows.append(("done", f"{count_responses(run_dir)} responses are stored"))
        rows += [("" if number else "scores", text) for number, text in enumerate(_scores(run_dir))]
    elif run.values and not (config is not None and config.pipeline_spec.rank0_only):
        rows.append(("step", _progress(run, now, runs)))
        if config is not None and (runs or not run.finished):
            rows += [("time", text) for text in _time(run, config, job if runs else None, now)]
        rows.append(("saved", _checkpoint(run, now)))
    if cost := in_short(run_hours(RunFiles(run_dir, state(run, job), accounting), now)):
        rows.append(("cost", cost))
    rows += _branches(run)
    rows += _restarts(run)
    rows += [("samples", text) for text in _sample_errors(run)]
    if error := last_error(run):
        rows.append(("error", error))
    if (hang := hang_path(run_dir, run.attempt)).is_file():
        rows.append(("hang", f"{hang}: who waited for whom, and all stacks"))
    if obstacle := run.obstacle:
        rows.append(("config", f"roles and times are not shown: {obstacle}"))
    return "\n".join(f"{name:<9}{text}" for name, text in rows)


def line(run_dir: Path, job: slurm.Job | None, now: float) -> str:
    """The run in one line."""
    run, label = RunFolder(run_dir), str(run_dir.relative_to(RUNS) if run_dir.is_relative_to(RUNS) else run_dir.name)
    word = state(run, job).split(":")[0]
    pipeline = run.config.pipeline_spec if run.config is not None else None
    if not run.values or (pipeline is not None and pipeline.rank0_only):
        return f"{label:<23} {word}"
    if pipeline is not None and pipeline.writes_responses:
        return f"{label:<23} {word:<10}  {count_done(run_dir)} prompts"
    if pipeline is not None and not pipeline.trains:
        done = _scores(run_dir) or [f"{count_responses(run_dir)} responses"]
        return "  ".join((f"{label:<23} {word:<10}", *done))
    values = [f"{name} {form.format(found[1])}" for metric, name, form in TRAINED if (found := run.newest(metric))]
    left = run.seconds_left()
    eta = [f"ETA {duration(left)}"] if _runs(run, job) and left is not None else []
    finished = run.finished
    why = finished["reason"].partition(": ")[2] if finished and finished["step"] < finished["max_steps"] else ""
    early = [f"ended early: {why}"] if why else []
    return "  ".join((f"{label:<23} {word:<12}step {run.step}/{run.steps}", *values, *eta, *early))


def state(run: RunFolder, job: slurm.Job | None) -> str:
    """One of queued, requeued, held, starting, running, ending, finished, stopped, refused, lost, never started,
    unknown; then optionally a colon and details."""
    owner, attempt = run.owner, run.attempt
    mine = job is not None and owner.get("job") == job.id and owner.get("restarts") == job.restarts
    if job is not None and job.lives:
        if job.state in ("PENDING", "REQUEUED"):
            if job.held:
                return f"held: job {job.id} waits ({job.reason}) until it is released: {_release(job)}"
            word = "requeued" if attempt and job.restarts else "queued"
            return f"{word}: job {job.id} waits{f' ({job.reason})' if job.reason not in ('', 'None') else ''}"
        if mine and "ended" not in owner:
            word = "running" if job.state == "RUNNING" else "ending" if job.state == "COMPLETING" else job.state.lower()
            return f"{word}: job {job.id}, attempt {attempt} since {owner['since']}"
        return f"{'ending' if mine else 'starting'}: job {job.id} is {job.state.lower()}"
    if "ended" not in owner and "pid" in owner and not lives_as_job(owner):
        held = f"pid {owner['pid']} on {owner['host']}, attempt {attempt} since {owner['since']}"
        if owner["host"] != platform.node():
            return f"unknown: {held}; check there"
        if process_lives(owner["pid"], owner["process_start"]):
            return f"running: {held}"
    if finished := run.finished:
        return f"finished: {finished['reason']}, {finished['at']}"
    if job is not None and job.state == "UNKNOWN" and "ended" not in owner:
        return f"unknown: job {job.id}: {job.reason}"
    says = f"job {job.id} is {job.state.lower()}" if job is not None else "Slurm lists no job of this run"
    if job is not None and job.state == "OUT_OF_MEMORY":
        says = f"job {job.id} was killed for lack of memory (OUT_OF_MEMORY): raise the memory of its components"
    if refused := read_refusal(run.folder):
        problems = "; ".join(refused["problems"])
        return f"refused: job {refused['job']} could not start an attempt at {refused['at']}: {problems}"
    if not attempt:
        return f"never started: {says}" if (run.folder / SUBMITTED).exists() else "never started"
    if "ended" in owner:
        # The run should continue, but no job of the run is queued.
        why = "no job of this run is queued" if owner.get("goes_on") else owner.get("why")
        how = f" ({owner['how']}): {why}" if "how" in owner else ""
        return f"stopped: attempt {attempt} ended {owner['ended']}{how}; the same command resumes it"
    holder = says if lives_as_job(owner) else f"pid {owner.get('pid')} on {owner.get('host')} is gone"
    return f"lost: attempt {attempt} ended without a report, {holder}; the same command resumes it"


def _release(job: slurm.Job) -> str:
    return "an administrator holds it" if "admin" in job.reason.lower() else f"scontrol release {job.id}"


def last_error(run: RunFolder) -> str:
    """The newest message of a failed attempt; empty without one."""
    for attempt in sorted(run.owners, reverse=True):
        world = world_folder(run.folder, attempt)
        told = read_record(world / VERDICT, code=int, message=str)
        judged = read_judgement(world)
        if told and told["code"] not in ASKED:
            return f"attempt {attempt}: {told['message']}"
        if judged is not None and judged.message and judged.code not in ASKED:
            return f"attempt {attempt}: {judged.message}"
    logs = sorted((run.folder / SLURM).glob("job-*.log"), key=lambda path: path.stat().st_mtime)
    if logs and not run.attempt:
        lines = [text.strip() for text in logs[-1].read_text(errors="replace").splitlines() if text.strip()]
        return f"{logs[-1]} ends with: {lines[-1]}" if lines else ""
    return ""


def _sample_errors(run: RunFolder) -> Iterable[str]:
    """The most frequent errors of rewards and environments, each of which cost a sample."""
    known = sorted(read_errors(run.folder), key=lambda kind: -kind["count"])
    for kind in known[:SHOWN_ERRORS]:
        whose = f"{kind['source']} of domain {kind['domain']}: " if kind["source"] else ""
        yield f"{kind['count']} samples with an error, the last {kind['last']}: {whose}{kind['error']}"
    if left := known[SHOWN_ERRORS:]:
        yield f"{sum(kind['count'] for kind in left)} samples with {len(left)} other kinds: {run.folder / ERRORS}"


def find_run(name: str) -> Path:
    """A run's folder, given as a folder, a name under runs/ or a job. ConfigError if there is none."""
    for folder in (Path(name), RUNS / name):
        if (folder / CONFIG).exists() or (folder / SUBMITTED).exists():
            return folder
    if not name.isdigit():
        raise ConfigError([f"{name} is not a run folder (no {CONFIG}), a run in {RUNS}/ or a job"])
    try:
        text = slurm.call("scontrol", "--oneliner", "show", "job", name)
    except slurm.SlurmError as error:
        text, why = "", str(error)
    else:
        why = "it was not started by hpcrl"
    if found := re.search(r"StdOut=(.*?)/slurm/job-\d+\.log", text):
        return Path(found[1])
    for folder in _runs_here():
        with contextlib.suppress(ConfigError):  # another run's folder may be damaged
            if int(name) in {
                *submitted_jobs(folder),
                *(owner.get("job") for owner in RunFolder(folder).owners.values()),
            }:
                return folder
    raise ConfigError([f"job {name} belongs to no run in {RUNS}/, and Slurm does not give its folder: {why}"])


def find_folder(name: str) -> Path:
    """As find_run(), but a folder need not have a configuration, which a run that has not started or is damaged may
    lack."""
    return next((path for path in (Path(name), RUNS / name) if path.is_dir()), None) or find_run(name)


def find_job(run: RunFolder) -> slurm.Job | None:
    """The current or waiting job of this run, else its last job; None if Slurm lists none. Its state is UNKNOWN, with
    the reason, if Slurm cannot be queried or the job belongs to another cluster."""
    cluster = read_record(run.folder / SUBMITTED).get("cluster") or run.owner.get("cluster", "")
    numbers = [*([run.owner["job"]] if lives_as_job(run.owner) else []), *submitted_jobs(run.folder)]
    try:
        if numbers and cluster and (here := slurm.cluster_name()) != cluster:  # the same id is another job here
            return slurm.Job(numbers[-1], "UNKNOWN", 0, False, f"run this on cluster {cluster}, not on {here}", None)
        known = [job for number in dict.fromkeys(numbers) if (job := slurm.find_job(number)) is not None]
    except slurm.SlurmError as error:
        return slurm.Job(numbers[-1], "UNKNOWN", 0, False, str(error), None)
    living = [job for job in known if job.lives]
    if living or known:
        return min(living, key=lambda job: job.state == "PENDING") if living else known[-1]
    return slurm.find_accounted(numbers[-1]) if numbers else None


def _runs(run: RunFolder, job: slurm.Job | None) -> bool:
    return state(run, job).startswith("running")


def _runs_here() -> list[Path]:
    """The runs in runs/, and the runs of sweeps, which are one folder deeper."""
    return sorted(
        run
        for folder in _folders_in(RUNS)
        for run in ([folder] if _is_run(folder) else _folders_in(folder))
        if _is_run(run)
    )


def _folders_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    except PermissionError:
        return []


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).exists() or (folder / SUBMITTED).exists()


def _where(run: RunFolder, config: Config) -> Iterable[tuple[str, str]]:
    """Component, its nodes, and the ranks of each role there."""
    layout = RoleLayout.from_config(config)
    names = {report.node: report.name for report in read_reports(world_folder(run.folder, run.attempt))}
    if config.cluster.name == "local":
        yield "where", f"{run.owner.get('host', 'this machine')}: {_roles(layout, range(layout.world_size))}"
        return
    for component in Placement.from_config(config, layout).components:
        numbers = range(component.first_node, component.first_node + len(component.nodes))
        nodes = [names.get(number, f"node {number}") for number in numbers]
        shown = " ".join(nodes[:SHOWN_NODES]) + (f" ... ({len(nodes)} nodes)" if len(nodes) > SHOWN_NODES else "")
        yield (
            "where",
            f"{component.name}: {shown}: {_roles(layout, [rank for node in component.nodes for rank in node])}",
        )


def _roles(layout: RoleLayout, ranks: Sequence[int] | range) -> str:
    found = []
    for role, its_ranks in layout.ranks.items():
        if mine := sorted(set(its_ranks) & set(ranks)):
            whole = mine[-1] - mine[0] + 1 == len(mine) and len(mine) > 1
            found.append(f"{role} {f'{mine[0]}-{mine[-1]}' if whole else ' '.join(map(str, mine))}")
    return ", ".join(found)


def _progress(run: RunFolder, now: float, runs: bool) -> str:
    parts = [f"{run.step} of {run.steps}"]
    logged = (run.folder / METRICS).stat().st_mtime if run.rows else None
    if runs and run.began is not None and (logged is None or logged < run.began):
        parts[0] += f", attempt {run.attempt} began {duration(now - run.began)} ago and has completed no step yet"
    elif runs and logged is not None:
        now = max(now, logged)  # the run may have written since
        stalled = now - logged > max(STALLED_S, STALLED * (run.step_s or 0.0))
        parts[0] += f", {duration(now - logged)} ago{', much longer than a step takes' if stalled else ''}"
    if run.rows:
        for name, word, form in SHOWN:
            if found := run.newest(name):
                parts.append(f"{word} {form.format(found[1])}" + f" (step {found[0]})" * (found[0] != run.step))
    if run.step_s:
        parts.append(f"{60 / run.step_s:,.3g} steps/min")
    return "  ".join(parts)


def _time(run: RunFolder, config: Config, job: slurm.Job | None, now: float) -> Iterable[str]:
    """Time left of the run, and whether this job is long enough."""
    left = run.seconds_left()
    if left is None or not left:
        return
    if job is None or job.end is None:
        yield f"{duration(left)} left at this rate"
        return
    limit = job.end - now
    how = "it is requeued and resumes" if config.cluster.after == "requeue" else "the next job resumes"
    if job.preempted:
        yield f"{duration(left)} left; the job is being preempted: the run saves, {how}"
        return
    text = f"{duration(left)} left, the job's time limit is in {duration(max(limit, 0))}"
    if left > limit:
        step = run.step + int(max(limit - config.cluster.signal_lead_s, 0) / (run.step_s or 1))
        text += f": not enough, around step {step} {how}"
    yield text


def _scores(run_dir: Path) -> list[str]:
    """`set score ± standard error` of each set of an evaluation alone; empty before its end, or if it is damaged."""
    try:
        return scores_in_short(json.loads((run_dir / SUMMARY).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _checkpoint(run: RunFolder, now: float) -> str:
    step = committed_step(run.folder)
    if step < 0:
        return f"no checkpoint yet{_failed_saves(run, step)}"
    age = max(now - (run.folder / "checkpoints" / step_name(step) / "manifest.json").stat().st_mtime, 0.0)
    return f"step {step}, {duration(age)} ago{_best(run.folder / 'checkpoints')}{_failed_saves(run, step)}"


def _failed_saves(run: RunFolder, step: int) -> str:
    """How many saves have failed since the checkpoint of `step`."""
    failed = run.rows[-1].get("checkpoint/failed") if run.rows and run.step > step else None
    return f"; {failed:.0f} save(s) failed since" if failed else ""


def _best(checkpoints: Path) -> str:
    try:
        best = read_best(checkpoints)
    except ValueError:  # the next attempt writes it again
        return ""
    return f"; best step {best.step}, {best.metric} {best.value:.4g}" if best is not None else ""


def _branches(run: RunFolder) -> Iterable[tuple[str, str]]:
    """The branches of the run, newest first."""
    try:
        found = branches_of(read_attempts(run.folder))
    except ConfigError:  # the next start names the damage
        return
    for number, branch in enumerate(found[: -SHOWN_RESTARTS - 1 : -1]):
        changes = ", ".join(map(str, branch["changes"])) or "nothing changed"
        reason = f" ({branch['reason']})" if branch["reason"] else ""
        yield "" if number else "branches", f"attempt {branch['attempt']} from step {branch['from']}: {changes}{reason}"


def _restarts(run: RunFolder) -> Iterable[tuple[str, str]]:
    """Earlier attempts, newest first; another job, such as the previous job of a chain, does not count as a restart."""
    earlier = [attempt for attempt in sorted(run.owners, reverse=True) if attempt != run.attempt]
    if earlier:
        jobs = [run.owners[attempt].get("job") for attempt in sorted(run.owners)]
        others = sum(None not in pair and len(set(pair)) > 1 for pair in pairwise(jobs))
        yield "restarts", f"{len(earlier) - others}{f', after {others} earlier job(s)' if others else ''}"
    for attempt in earlier[:SHOWN_RESTARTS]:
        owner = run.owners[attempt]
        where = f"job {owner['job']}" if "job" in owner else f"pid {owner.get('pid')}"
        how = f"{owner.get('how', 'ended')}: {owner['why']}" if "why" in owner else _outcome(owner)
        yield "", f"attempt {attempt}, {where}, {owner.get('since')}: {how}"


def _outcome(owner: dict[str, Any]) -> str:
    return "ended" if "ended" in owner else "lost without a report"


def _described(folder: Path, job: slurm.Job | None) -> str:
    """The run with the hours of its jobs, unless Slurm cannot be queried anyway."""
    silent = job is not None and job.state == "UNKNOWN"
    return describe(folder, job, time.time(), NOT_ASKED if silent else accounting_of(RunFiles(folder)))


def main(argv: Sequence[str]) -> int:
    """Command line."""
    if len(argv) > 1 or any(word.startswith("-") for word in argv):
        print(in_shell(__doc__))
        return ExitCode.DONE if list(argv) in (["-h"], ["--help"]) else ExitCode.BAD_INPUT
    try:
        folders = [find_run(argv[0])] if argv else _runs_here()
        if not folders:
            show(f"no run in {RUNS}/")
    except (ConfigError, OSError) as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    code = ExitCode.DONE
    for folder in folders:
        try:
            job = find_job(RunFolder(folder))
            shown = _described(folder, job) if argv else line(folder, job, time.time())
        except (ConfigError, OSError) as error:  # the other runs are still shown
            print(f"hpcrl: {error}", file=sys.stderr)
            code = ExitCode.BAD_INPUT
            continue
        if not show(shown):
            break
    return code


if __name__ == "__main__":
    use_utf8()
    sys.exit(main(sys.argv[1:]))
