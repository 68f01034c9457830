"""`hpcrl stacks` over several nodes, from the login node."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcrl.commands.stacks import main
from hpcrl.system.exit_codes import ExitCode
from tests import in_process
from tests.conftest import ROOT
from tests.slurm.jobs import CANCELLED, Run, processes, ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def stacks(cluster: Any, *words: str) -> subprocess.CompletedProcess[str]:
    return in_process.run(main, *words, at=ROOT, environ=cluster.environ)


def test_ranks_of_all_nodes_answer_and_a_node_without_an_answer_is_named(
    cluster: Any, tmp_path: Path, tiny: list[str]
) -> None:
    words = [*tiny, "layout=disaggregated", "layout.trainer.num_ranks=1", "layout.generator.num_ranks=1"]
    words += ["layout.reward.num_ranks=1", "max_steps=100000", "timeouts.store_s=120"]
    first, rest = "{roles: [controller, trainer, generator]}", "{roles: [reward]}"
    run = Run(cluster, tmp_path, *words, f"cluster.components={{first: {first}, rest: {rest}}}")
    run.wait_step(1)
    done = stacks(cluster, str(run.dir), "--wait", "60")
    assert done.returncode == ExitCode.DONE, done.stderr
    heads = re.findall(r"^rank (\d) \(([a-z]+)\) on \S+, process (\d+): in ", done.stdout, re.M)
    assert [(int(rank), role) for rank, role, _ in heads] == [
        *((0, "controller"), (1, "trainer"), (2, "generator"), (3, "reward"))
    ]
    own = ranks(cluster, run.job)
    assert {int(rank): int(pid) for rank, _, pid in heads} == {rank: process.pid for rank, process in own.items()}
    assert done.stdout.count("\nmain thread (most recent call first):\n") >= 4

    node = own[3].environ()["SLURMD_NODENAME"]
    there = [p for p, environ in processes(cluster, run.job).items() if environ.get("SLURMD_NODENAME") == node]
    agents = [p for p in there if "hpcrl.run" in " ".join(p.cmdline()) and not p.name().startswith("hpcrl-rank")]
    for agent in agents:
        agent.suspend()
    done = stacks(cluster, str(run.dir), "--wait", "4")
    for agent in agents:
        agent.resume()
    assert done.returncode == ExitCode.DEADLINE and "\nrank 2 (generator)" in done.stdout
    assert re.match(rf"hpcrl: node {node} \(rank 3\): no answer within 4 s; on the node itself: ", done.stderr)
    cluster.run("scancel", str(run.job))
    run.wait_end(CANCELLED)
    done = stacks(cluster, str(run.dir))
    assert done.returncode == ExitCode.BAD_INPUT and done.stdout == ""
    assert done.stderr.startswith(f"hpcrl: {run.dir} does not run: ") and done.stderr.count("\n") == 1
