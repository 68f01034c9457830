"""Memory limits and out-of-memory kills as the kernel reports them: on trees like /proc and /sys, and in a cgroup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.node.host_memory import OutOfMemoryKills, memory_limit
from tests.dist.test_agent import AGENT, HEAD

MEMINFO = "MemTotal:       2000 kB\nMemFree:         100 kB\n"
V1, V2 = "9:pids:/\n4:memory:/slurm/job_7\n0::/\n", "0::/slurm/job_7/step_0\n"
UNLIMITED = "9223372036854771712\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "limit", "where"),
    [
        ({}, 2_048_000, "the machine's memory"),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n"}, 2_048_000, "machine"),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "5000\n"}, 5000, "step_0/memory.max"),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/slurm/job_7/memory.max": "6000\n"}, 6000, "job_7/memory.max"),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED}, 2_048_000, "machine"),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": "7000"}, 7000, "job_7/mem"),
    ],
)
def test_the_smallest_memory_limit_counts(files: dict[str, str], limit: int, where: str, tmp_path: Path) -> None:
    found, source = memory_limit(tree(tmp_path, {"proc/meminfo": MEMINFO} | files))
    assert found == limit and where in source


@pytest.mark.parametrize(("driver", "limit"), [("nvidia/version", 2_048_000 - 2 * 300 * 1024), ("other", 2_048_000)])
def test_memory_of_gpus_with_numa_nodes_is_not_the_machines(driver: str, limit: int, tmp_path: Path) -> None:
    """Memory in nodes without CPUs is the machine's own if it is no GPU's."""
    nodes = {f"sys/devices/system/node/node{number}": cpus for number, cpus in enumerate(("0-71\n", "\n", "\n"))}
    files = {"proc/meminfo": MEMINFO, f"proc/driver/{driver}": ""}
    files |= {f"{folder}/cpulist": cpus for folder, cpus in nodes.items()}
    files |= {f"{folder}/meminfo": f"{Path(folder).name} MemTotal:    300 kB\n" for folder in nodes}
    assert memory_limit(tree(tmp_path, files)) == (limit, "the machine's memory")


def test_a_machine_without_cgroup_files_has_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) == (0, "")
    assert OutOfMemoryKills.now(tmp_path) == OutOfMemoryKills()


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        (V2, "sys/fs/cgroup/slurm/job_7/step_0/memory.events"),
        (V1, "sys/fs/cgroup/memory/slurm/job_7/memory.oom_control"),
    ],
)
def test_out_of_memory_kills_are_counted(groups: str, file: str, tmp_path: Path) -> None:
    def now(in_cgroup: int, on_machine: int) -> OutOfMemoryKills:
        files = {file: f"oom 9\noom_kill {in_cgroup}\n", "proc/vmstat": f"nr_free 3\noom_kill {on_machine}\n"}
        return OutOfMemoryKills.now(tree(tmp_path, {"proc/self/cgroup": groups} | files))

    before = now(1, 4)
    assert before == OutOfMemoryKills(1, 4) and before.explain(before) == ""
    assert "limit of its cgroup was reached" in now(2, 5).explain(before)
    assert "perhaps by the kernel" in now(1, 5).explain(before)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup with a limit of 200 MB. Needs the right to create one."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own, limit = Path("/sys/fs/cgroup") / next((p.lstrip("/") for _, c, p in lines if not c), ""), "memory.max"
    if v1 := [path for _, controllers, path in lines if controllers == "memory"]:
        own, limit = Path("/sys/fs/cgroup/memory") / v1[0].lstrip("/"), "memory.limit_in_bytes"
    group = own / f"hpcrl_test_{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text("200000000")
    except OSError as error:
        pytest.skip(f"no cgroup with a limit can be made: {error}")
    yield group
    group.rmdir()


@pytest.mark.slow
@pytest.mark.alone  # elsewhere a rank killed by a test might be reported as killed for lack of memory
def test_a_rank_killed_for_lack_of_memory_is_reported_as_such(cgroup: Path, tmp_path: Path) -> None:
    greedy = HEAD + "up(); time.sleep(.2); x = bytearray(600 << 20)"
    ended = "wait('pid_{0}')\nwhile Path('/proc', Path(folder, 'pid_{0}').read_text()).exists(): time.sleep(.02)\n"
    other = HEAD + "up()\n" + ended.format(1) + "os.kill(os.getpid(), signal.SIGKILL)"  # afterwards, not for memory
    programs = [HEAD + "up()\n" + ended.format(2), greedy, other]
    enter = f'echo $$ > {cgroup}/cgroup.procs; exec {sys.executable} -c "$0" "$@"'
    done = subprocess.run(
        ["sh", "-c", enter, AGENT, str(tmp_path), json.dumps(programs), "{}", ""],
        capture_output=True,
        text=True,
        check=False,
    )
    lost = json.loads(done.stdout.splitlines()[-1])["lost"]
    assert lost["1"].endswith(
        "was killed by SIGKILL (by the kernel, for lack of memory: the limit of its cgroup was reached)"
    )
    assert lost["2"].endswith("was killed by SIGKILL")
