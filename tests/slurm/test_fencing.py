"""Two jobs of one run at once: a node that Slurm lost continues, while the job starts elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.system.files import committed_step
from tests.slurm.jobs import Run, processes, ranks, show, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextlib.contextmanager
def ended(cluster: Any, job: int) -> Iterator[None]:
    """No process of the job is left, including processes that Slurm no longer reaches."""
    try:
        yield
    finally:
        for process in processes(cluster, job):
            with contextlib.suppress(psutil.Error):
                process.kill()


def test_training_on_a_lost_node_is_never_committed(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    """Its slurmd is dead and its network works: the worst case, since the old ranks still see the run folder."""
    run = Run(cluster, tmp_path, *tiny, "save_every=1", "max_steps=1000", "cluster.max_restarts=0", pace=0.3)
    with ended(cluster, run.job):
        run.wait_step(3)
        node = show(cluster, run.job)["BatchHost"]
        old = ranks(cluster, run.job).values()
        assert old
        cluster.kill_node(node)
        run.wait_restart(1)
        # Until the next attempt opens the run, the old one owns it and may commit.
        wait_until((run.dir / "owners" / "0002").exists, lambda: run.log)
        assert any(process.is_running() for process in old), "nobody was left to be fenced off"
        committed = committed_step(run.dir)
        superseded = run.dir / "world" / "attempt_0001" / "verdict.json"
        wait_until(superseded.exists, lambda: run.log)
        assert "attempt 2 now owns the run" in superseded.read_text()
        run.wait_said("resumed from step_")
        resumed = int(run.log.rpartition("resumed from step_")[2][:6])
        assert resumed in (committed, committed + 1), "at most the commit that was under way came through"
        assert show(cluster, run.job)["BatchHost"] != node
        run.wait_step(committed + 3)
        _, alive = psutil.wait_procs(old, timeout=20)
        assert not alive
        cluster.run("scancel", str(run.job))
        said = run.wait_end("CANCELLED").partition("attempt 2 in job")[2]
    assert "attempt 1 ended" not in said, "it has no word in the run any more"
    assert run.restarts == 1, "the old job's script put it back into the queue"
    cluster.start_node(node)
