"""Generators that continue while the trainer works, as components of one job that is preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.metrics.log import read_metrics
from tests.e2e.test_resume import check_accounts
from tests.slurm.jobs import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMPONENTS = "{train: {roles: [controller, trainer]}, gen: {roles: [generator]}, cpu: {roles: [reward, env]}}"


def test_a_preempted_asynchronous_job_keeps_its_accounting(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    """Its samples are episodes of two turns; the reward scores the last turn."""
    words = [*tiny, "deterministic=false", "layout=disaggregated", "layout.trainer.num_ranks=1"]
    words += ["pipeline=agentic", "env=scripted", "env.default.add_reward=true"]
    words += ["layout.generator.num_ranks=2", "rollout.max_staleness=1", "algorithm.correction=truncate"]
    words += [f"cluster.components={COMPONENTS}", "rollout.save_rollouts=true", "max_steps=24"]
    run = Run(cluster, tmp_path, *words)
    run.wait_step(4)
    run.tell(pace=1)  # it must not end before
    run.preempt(1)
    run.wait_said("resumed from", 1)
    check_accounts(run.dir)
    run.tell(pace=0)
    run.wait_end()
    check_accounts(run.dir)
    rows = [row for row in read_metrics(run.dir) if row["step"]]
    assert max(row["scheduler/staleness/max"] or 0.0 for row in rows) == 1 and run.restarts == 1
    assert max(row.get("env/default/turns") or 0.0 for row in rows) > 1
