"""A node that is off: nothing runs on it, and nothing sent to it arrives or is answered."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cutting_off import cut_off
from tests.slurm.jobs import CANCELLED, Run, processes, ranks, step_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STORE_S, SLACK_S = 9.0, 30.0


def test_a_run_survives_a_node_that_is_off_or_ends_its_attempt(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    """Its agent is as silent as its ranks. The reward ranks are on nodes of their own; then the last of them goes."""
    words = [*tiny, "layout=disaggregated", "layout.trainer.num_ranks=1", "layout.generator.num_ranks=1"]
    words += ["layout.reward.num_ranks=2", f"timeouts.store_s={STORE_S}", "max_steps=100000"]
    first, rest = "{roles: [controller, trainer, generator]}", "{roles: [reward], ranks_per_node: 1}"
    run = Run(cluster, tmp_path, *words, f"cluster.components={{first: {first}, rest: {rest}}}")
    run.wait_step(3)
    switch_off(cluster, run, 3)
    run.wait_said("the run continues without it", timeout_s=STORE_S + SLACK_S)
    assert re.search(r"rank 3 \(reward\) on \S+ is lost: its host does not answer; the run continues", run.log)
    run.wait_step(step_of(run.dir) + 3)
    began = time.monotonic()
    switch_off(cluster, run, 4)
    run.wait_said("rank 4 (reward)", timeout_s=STORE_S + SLACK_S)
    assert "is lost: its host does not answer (logs: " in run.log
    assert time.monotonic() - began < STORE_S + SLACK_S
    for process in processes(cluster, run.job):  # here a node's slurmstepd outlives it, and srun waits for it
        process.resume()
    run.wait_said("attempt 1 ended (rank_killed)")
    run.wait_restart(1)
    run.wait_said("resumed from step_")
    cluster.run("scancel", str(run.job))
    run.wait_end(CANCELLED)


def switch_off(cluster: Any, run: Run, rank: int) -> None:
    """The node of a rank: its agent and its ranks."""
    own = ranks(cluster, run.job)[rank]
    node = own.environ()["SLURMD_NODENAME"]
    there = [p for p, environ in processes(cluster, run.job).items() if environ.get("SLURMD_NODENAME") == node]
    of_hpcrl = [p for p in there if p == own or "hpcrl.run" in " ".join(p.cmdline())]
    assert len(of_hpcrl) >= 2, "the agent and the rank"
    for process in of_hpcrl:
        process.suspend()
    time.sleep(1)  # their sent data arrives: otherwise their kernel would retransmit it, unlike a node that is off
    for process in of_hpcrl:
        cut_off(process.pid, is_off=True)
