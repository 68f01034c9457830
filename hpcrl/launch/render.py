"""The batch script of a run, as `python -m hpcrl.launch +cluster=slurm` submits it and slurm/*.sbatch contain it.

It can be read, kept and submitted by hand: its arguments name the configuration that was submitted, or in
slurm/*.sbatch the experiment, which is composed when the run starts for the first time."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcrl.cluster.container import srun_options
from hpcrl.cluster.placement import Component, Placement, cpus_of_node
from hpcrl.config import ClusterConfig, ComponentConfig, Config, Problem
from hpcrl.config.cluster import GPU_OPTIONS, GpuRequest
from hpcrl.system.exit_codes import ExitCode

NOTHING_TO_DO = 3
"""Exit code of `hpcrl.launch.job begin` if the run is finished or must not be started again."""

RUN_DIR = re.compile(r"[A-Za-z0-9/._+@-]([A-Za-z0-9/._+@ -]*[A-Za-z0-9/._+@-])?")

REQUESTS: Mapping[GpuRequest, str] = {
    "gres": "--gres=gpu:{}",
    "gpus_per_node": "--gpus-per-node={}",
    "gpus_per_task": "--gpus-per-task={}",  # a node has one task
    "none": "",
}
"""cluster.gpu_request -> the option, for "TYPE:NUMBER" or "NUMBER" of a node."""

MODULE = re.compile(r"\b(module|ml)\b")
CHECK_LINES = f"""\
# A line of the prologue that fails ends the job; inside files that it sources, failures are theirs.
said() {{ echo "hpcrl: cluster.prologue: line $(($1 - prologue)) failed with $2" >&2; }}
trap 'rc=$?; line=$LINENO; [ ${{#BASH_SOURCE[@]}} -gt 1 ] || {{ said $line $rc; exit {ExitCode.BAD_INPUT:d}; }}' ERR
prologue=$LINENO"""

FIND_PYTHON = """\
# If `python` has no hpcrl, use the interpreter of `make setup` in this folder.
has_hpcrl() { python -c 'import hpcrl.launch.job' 2>/dev/null; }
has_hpcrl || PATH=$PWD/.venv/bin:$PATH
has_hpcrl || { echo "hpcrl: $(command -v python || echo python) has no hpcrl; run make setup in $PWD" >&2; exit 2; }
"""

BODY = """\
{setup}set -u
args=({arguments} "$@")
# Starts an attempt: checks everything, makes the run folder, takes ownership. A finished run ends the job here.
trap '' USR1 TERM
begun=$({python} -m hpcrl.launch.job begin "${{args[@]}}") || {{ rc=$?; [ $rc -eq {nothing} ] && exit 0; exit $rc; }}
read -r HPCRL_ATTEMPT HPCRL_JOB_END look_s run_dir <<<"$begun"
export HPCRL_ATTEMPT HPCRL_JOB_END

# Signals go to the step, whose agents stop the run at a step boundary; this shell must outlive it. Slurm kills a
# job KillWait seconds after a SIGTERM: a step that takes longer is killed before, so that `job end` still runs.
kill_wait=$(timeout 30 scontrol show config | awk '$1 == "KillWait" {{ print $3 }}')
kill_wait=${{kill_wait:-30}} # Slurm's default, if scontrol does not answer: 0 would give up at once
give_up() {{
    trap : TERM
    (sleep $((kill_wait / 2)) && kill -9 $step 2>/dev/null) &
    timer=$!
}}
timer=
# srun waits forever for a step whose daemon has died. The first node's agent renews a file while it watches its ranks:
# if the file is unchanged ten times in a row and the step still runs, the step is killed as well. Before the agent's
# first look, when images are pulled and nodes are checked, the step gets eight times as long.
watch() {{
    trap 'kill $! 2>/dev/null; exit' TERM
    local agent seen='' now still=0 most=80 what='never started'
    printf -v agent '%s/world/attempt_%04d/agent' "$run_dir" "$HPCRL_ATTEMPT"
    while [ $still -lt $most ]; do
        sleep "$look_s" &
        wait $!
        now=$(stat -c %y "$agent" 2>/dev/null)
        if [ "$now" = "$seen" ]; then still=$((still + 1)); else still=0 most=10 seen=$now what='has ended or hangs'; fi
    done
    # As hpcrl.system.log writes, for `hpcrl logs`.
    now="$(date -u +%Y-%m-%dT%H:%M:%S.%3N)+00:00 ${{SLURMD_NODENAME:-$HOSTNAME}}"
    echo "$now launch ERROR the first node's agent $what; killing the job step" >&2
    kill -9 $step
}}
trap : USR1
trap give_up TERM
srun {srun} \\
    {inside} -m hpcrl.run "$run_dir" &
step=$!
watch &
watcher=$!
while wait $step; rc=$?; kill -0 $step 2>/dev/null; do :; done
[ -z "$timer" ] || kill "$timer" 2>/dev/null # else it might kill a later process with the same id
kill $watcher 2>/dev/null

# Requeues the job or not, depending on how the run ended.
trap '' USR1 TERM
exec {python} -m hpcrl.launch.job end "$run_dir" "$HPCRL_ATTEMPT" "$rc"
"""


def render(config: Config, placement: Placement, arguments: Sequence[str], python: str = "") -> str:
    """The script. `arguments` are the command line's and `python` is the interpreter's path; without one, the script
    finds an interpreter when it starts, since it may be submitted from any shell."""
    cluster = config.cluster
    lines = ["#!/bin/bash", f"#SBATCH --job-name=hpcrl-{config.run_name}", *_job_options(cluster)]
    for i, component in enumerate(placement.components):
        if i:
            lines.append("#SBATCH hetjob")
        lines += [f"#SBATCH {option}" for option in _component_options(component, cluster)]
    num = len(placement.components)
    # A site may start batch scripts without the environment, which the step would inherit.
    srun = ["--export=ALL", "--kill-on-bad-exit=0", "--no-kill", "--wait=0"]
    # Since Slurm 22.05, steps do not inherit --cpus-per-task, and a site's task plugin would bind it to one core. The
    # agents need no PMI, which may be a site's default.
    srun += ["--cpu-bind=none", "--mpi=none", "--ntasks-per-node=1"]
    srun += [f"--het-group={','.join(map(str, range(num)))}"] if num > 1 else []
    srun += _further(cluster.srun_options)  # of two equal options, the last counts
    body = BODY.format(
        arguments=shlex.join(arguments),
        # Before set -u, under which modules and conda fail.
        setup="".join(f"{line}\n" for line in _setup(cluster)) + ("" if python else FIND_PYTHON),
        python=python or "python",
        inside=(python or "python") if cluster.container == "none" else "python",  # a container has its own
        nothing=NOTHING_TO_DO,
        srun=" ".join([*srun, *srun_options(cluster)]),
    )
    return "\n".join(lines) + "\n" + body


def check_arguments(arguments: Sequence[str], run_dir: Path) -> Iterator[str]:
    """Problems of arguments that a script cannot contain; sbatch expands the log's path."""
    if not RUN_DIR.fullmatch(str(run_dir)):
        text = "a batch script takes letters, digits, spaces and . _ + @ - in a path; choose another run_dir"
        yield f"run folder {str(run_dir)!r}: {text}"
    try:
        "".join(arguments).encode()
    except UnicodeEncodeError as error:
        yield f"the command line is not UTF-8: {error.object[max(error.start - 20, 0) : error.end]!r}"


def check_prologue(cluster: ClusterConfig) -> list[Problem]:
    """Refuses a prologue that continues past its last line, or that sbatch would parse."""
    text = cluster.prologue.rstrip()
    if re.search(r"^\s*#SBATCH", text, re.MULTILINE):
        said = "an #SBATCH line is not shell code; set sbatch options with their keys under cluster"
    elif text.endswith("\\"):
        said = "its last line ends with a backslash"
    else:
        done = subprocess.run(["bash", "-n"], input=text.encode(errors="replace"), capture_output=True, check=False)
        said = done.stderr.decode(errors="replace")
    return [Problem(("cluster", "prologue"), f"cluster.prologue: {said}")] if said else []


def _job_options(cluster: ClusterConfig) -> Iterator[str]:
    options = {
        "output": "hpcrl-%j.log",
        "open-mode": "append",
        "time": cluster.time,
        "signal": f"USR1@{cluster.signal_lead_s}",
        "account": cluster.account,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
        "exclude": cluster.exclude,
    }
    yield from (f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None)
    yield "#SBATCH --requeue" if cluster.after == "requeue" else "#SBATCH --no-requeue"


def _component_options(component: Component, cluster: ClusterConfig) -> Iterator[str]:
    spec = component.config
    yield f"--nodes={len(component.nodes)}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={cpus_of_node(component, cluster)}"
    if spec.gpus_per_node and not set(GPU_OPTIONS) & set(cluster.sbatch_options):
        gpus = f"{spec.gpu_type}:{spec.gpus_per_node}" if spec.gpu_type else str(spec.gpus_per_node)
        yield from REQUESTS[spec.gpu_request or cluster.gpu_request].format(gpus).split()
    values = {"mem": spec.memory, "partition": _first(spec, cluster, "partition")}
    values["constraint"] = _first(spec, cluster, "constraint")
    values["switches"] = cluster.switches  # the only option that sbatch does not apply to every component
    yield from (f"--{name}={value}" for name, value in values.items() if value is not None)
    yield from _further(cluster.sbatch_options)


def _further(options: Mapping[str, str | bool]) -> list[str]:
    """The site's options, quoted for the shell; sbatch understands these quotes too."""
    given = {name: value for name, value in options.items() if value is not False}
    return [f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}" for name, value in given.items()]


def _first(spec: ComponentConfig, cluster: ClusterConfig, name: str) -> str | None:
    value = getattr(spec, name)
    return value if value is not None else getattr(cluster, name)


def _setup(cluster: ClusterConfig) -> Iterator[str]:
    if cluster.modules or MODULE.search(cluster.prologue):
        # A site may define `module` for login shells only, and a batch script is not one.
        yield "type module >/dev/null 2>&1 || . /etc/profile"
    if cluster.modules:
        yield f"module load {shlex.join(cluster.modules)} || exit {ExitCode.BAD_INPUT}"
    for name, value in cluster.environment.items():
        yield f"export {name}={shlex.quote(value)}"
    if cluster.prologue:
        yield from (CHECK_LINES, cluster.prologue.rstrip(), "trap - ERR")
    if cluster.network_interface is not None:
        name = shlex.quote(cluster.network_interface)
        yield f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME=={name}"  # =: see hpcrl.messaging.network.use
