"""Many nodes: the same code path as for four, with many agents, reports and ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.node.preflight import needs_of, read_reports
from hpcrl.run_folder import stored_config, world_folder
from tests.slurm.jobs import Run, digest, ranks, step_of, wait_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RANK_BYTES = 180 << 20  # of a reward rank, most of it torch
START_S = 400.0


@pytest.fixture(params=[12, pytest.param(64, marks=pytest.mark.soak)])
def large(request: pytest.FixtureRequest, one_machine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of many nodes with four cores each."""
    num_nodes = request.param
    if psutil.virtual_memory().available < num_nodes * RANK_BYTES:
        pytest.skip(f"{num_nodes} ranks need {num_nodes * RANK_BYTES >> 30} GiB of free memory")
    nodes = one_machine.Nodes("n", num_nodes, cpus=4, memory_mb=2000)
    with one_machine.Cluster(tmp_path_factory.mktemp("large"), [nodes]) as running:
        yield running


def test_a_run_on_many_nodes_trains(large: Any, tmp_path: Path, tiny: list[str]) -> None:
    """A trainer, a generator, and a reward rank on each other node; two components in one run."""
    num_nodes = len(large.names)
    words = [*tiny, "max_steps=3", "save_every=0", f"timeouts.start_s={START_S}", "layout=disaggregated"]
    words += ["layout.trainer.num_ranks=1", "layout.generator.num_ranks=1"]
    words += [f"layout.reward.num_ranks={num_nodes - 1}"]
    first, rest = "{roles: [controller, trainer, generator]}", "{roles: [reward], ranks_per_node: 1}"
    began = time.monotonic()
    run = Run(large, tmp_path, *words, f"cluster.components={{first: {first}, rest: {rest}}}", pace=3)
    wait_step(large, run.dir, run.job, 1, START_S)
    started_s = time.monotonic() - began
    reports = read_reports(world_folder(run.dir, 1))
    assert [report.name for report in reports] == [f"n{i}" for i in range(1, num_nodes + 1)]
    assert [report.ranks for report in reports] == [[0, 1, 2], *([rank] for rank in range(3, num_nodes + 2))]
    there = ranks(large, run.job)
    assert sorted(there) == list(range(num_nodes + 2))
    assert len({process.environ()["SLURMD_NODENAME"] for process in there.values()}) == num_nodes
    files = {rank: process.num_fds() for rank, process in there.items()}
    asked = {rank: need.open_files for need in needs_of(stored_config(run.dir)) for rank in need.ranks}
    assert all(num < asked[rank] for rank, num in files.items()), "what preflight asks for is enough"
    run.tell(pace=0)
    run.wait_end(timeout_s=120)
    print(f"first step after {started_s:.0f} s, open files {files[0]} of the controller, {files[3]} of a reward rank")
    assert step_of(run.dir) == 3 and digest(run.dir)
