"""Everything of conf/cluster reaches every component; containers, modules and the prologue on real daemons."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpcrl.cluster.placement import Placement
from hpcrl.config import ConfigError
from hpcrl.launch.prepare import prepare
from hpcrl.launch.render import render
from hpcrl.node.preflight import read_reports
from hpcrl.run_folder import world_folder
from tests.slurm.jobs import COMPLETED, FAILED, launch, log, show, submit, wait_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

HETJOB = [
    *("layout=disaggregated", "layout.trainer.num_ranks=1", "layout.generator.num_ranks=1"),
    "cluster.components={train: {roles: [controller, trainer]}, gen: {roles: [generator, reward]}}",
]
STAND_IN = """\
#!/bin/bash
# Stands in for the program of this name: records its arguments, leaves out its own and runs the rest.
printf '%s\\0' "$@" > "{folder}/argv-$SLURM_PROCID"
echo "$PWD" > "{folder}/pwd-$SLURM_PROCID"
while [ "$1" != "{image}" ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture
def reserved(cluster: Any) -> Iterator[None]:
    """n1-n3 have the feature ib and are reserved as `booked`."""
    cluster.run("scontrol", "update", "nodename=n[1-3]", "availablefeatures=ib,ssd", "activefeatures=ib,ssd")
    user = cluster.run("id", "-un").strip()
    cluster.run(
        *("scontrol", "create", "reservation", "reservationname=booked", "starttime=now", "duration=60"),
        *("nodes=n[1-3]", f"users={user}"),
    )
    yield
    cluster.run("scancel", "--state=PENDING", f"--user={user}", check=False)
    cluster.run("scontrol", "delete", "reservationname=booked")


def test_every_option_reaches_every_component(cluster: Any, tmp_path: Path, tiny: list[str], reserved: None) -> None:
    cluster.run("scontrol", "update", "partition=solo", "state=down")  # it must stay pending during the check
    try:
        options = (
            "account=physics qos=fast reservation=booked constraint=ib&ssd exclude=n[3-4] switches=1@00:02:00 "
            "partition=solo time=00:31:00"
        )
        words = [f"cluster.{option}" for option in options.split()]
        words.append("cluster.sbatch_options={exclusive: true, comment: 'two words'}")
        job = submit(cluster, tmp_path / "run", *tiny, *HETJOB, *words, "max_steps=1")
        components = cluster.run("scontrol", "--oneliner", "show", "job", str(job)).splitlines()
        assert len(components) == 2
        for component in components:
            shown = dict(re.findall(r"(\w+)=(\S*)", component))
            wanted = {
                **{"Account": "physics", "Reservation": "booked", "Features": "ib&ssd", "ExcNodeList": "n[3-4]"},
                **{"Switches": "1@00:02:00", "Partition": "solo", "TimeLimit": "00:31:00", "Requeue": "1"},
                **{"OverSubscribe": "NO", "Comment": "two"},
            }
            assert {name: shown.get(name) for name in wanted} == wanted
        script = cluster.run("scontrol", "write", "batch_script", str(job), "-")
        assert "#SBATCH --qos=fast" in script  # without accounts Slurm knows no qos, and shows none
        cluster.run("scancel", str(job))
    finally:
        cluster.run("scontrol", "update", "partition=solo", "state=up")


def test_a_run_in_a_reservation_uses_its_nodes(cluster: Any, tmp_path: Path, tiny: list[str], reserved: None) -> None:
    words = ["cluster.reservation=booked", "cluster.constraint=ib", "cluster.exclude=n1"]
    words.append("cluster.srun_options={mpi: none, label: true}")
    job = submit(cluster, tmp_path / "run", *tiny, *HETJOB, *words, "max_steps=1")
    wait_state(cluster, tmp_path / "run", job, (COMPLETED,))
    found = re.search(r"^0: \S+ n\d rank 0 INFO step 1/1 ", log(tmp_path / "run"), re.MULTILINE)
    assert found is not None, "srun has labelled what the agents print"
    shown = cluster.run("scontrol", "--oneliner", "show", "job", str(job))
    assert set(re.findall(r" NodeList=(\S+)", shown)) == {"n2", "n3"}
    missing = launch(cluster, tmp_path / "other", *tiny, "cluster.reservation=none_such", "max_steps=1")
    assert missing.returncode == 2 and "reservation" in missing.stderr and len(missing.stderr.splitlines()) == 1


def test_a_job_step_may_use_every_requested_core(
    one_machine: ModuleType, tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the site's task plugin binds a node's single task to one core."""
    cores = len(os.sched_getaffinity(0))
    conf = one_machine.CONF.replace("TaskPlugin=task/none", "TaskPlugin=task/affinity")
    monkeypatch.setattr(one_machine, "CONF", conf)
    with one_machine.Cluster(tmp_path / "slurm", [one_machine.Nodes("a", 1, cpus=cores)]) as cluster:
        look = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
        assert (
            cluster.run("srun", "--ntasks=1", f"--cpus-per-task={cores}", "--cpu-bind=map_cpu:0", *look).strip() == "1"
        )
        words = [f"cluster.components={{main: {{cpus_per_node: {cores}}}}}", "max_steps=1"]
        job = submit(cluster, tmp_path / "run", *tiny, *words)
        wait_state(cluster, tmp_path / "run", job, (COMPLETED,))
    (report,) = read_reports(world_folder(tmp_path / "run", 1))
    assert report.cpus == cores


def stand_in(folder: Path, image: Path) -> Path:
    """A folder for PATH with a program apptainer that records and execs."""
    image.write_bytes(b"")
    program = folder / "bin" / "apptainer"
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN.format(folder=folder, image=image))
    program.chmod(0o755)
    python = program.parent / "python"  # the image's
    python.write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return program.parent


def test_ranks_run_in_an_apptainer_image(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    image, data = tmp_path / "my&image.sif", tmp_path / "data"
    data.mkdir()
    path = stand_in(tmp_path, image)
    run_dir = tmp_path / "runs" / "run"
    container = ["cluster.container=apptainer", f"cluster.image='{image}'", f"cluster.mounts=['{data}:/data']"]
    words = [*container, f"cluster.prologue='export PATH={path}:$PATH'", "max_steps=1"]
    job = submit(cluster, run_dir, *tiny, *HETJOB, *words)
    wait_state(cluster, run_dir, job, (COMPLETED,))
    here = os.getcwd()
    for node in (0, 1):
        argv = (tmp_path / f"argv-{node}").read_text().split("\0")[:-1]
        binds = ["--bind", here, "--bind", str(run_dir), "--bind", f"{data}:/data"]
        assert argv == [*("exec", "--nv"), *binds, "--pwd", here, str(image), "python", "-m", "hpcrl.run", str(run_dir)]
        assert (tmp_path / f"pwd-{node}").read_text().strip() == here


def test_pyxis_words_are_one_argument_each(tmp_path: Path) -> None:
    words = [
        "cluster.container=pyxis",
        "cluster.image='registry#group/image:1'",
        f"cluster.mounts=[/tmp,'{tmp_path}:/x']",
    ]
    config, layout, *_ = prepare(["+cluster=slurm", *words])
    script = render(config, Placement.from_config(config, layout), words)
    step = script[script.index("\nsrun ") :].partition(" &\n")[0].replace("\nsrun", "printf '%s\\0'", 1)
    bash, environ = ["bash", "-c", step], {"run_dir": "/a b/run"}
    done = subprocess.run(bash, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True)
    arguments = done.stdout.split("\0")[:-1]
    assert "--container-image=registry#group/image:1" in arguments
    mounts = f"{tmp_path}:{tmp_path},/a b/run:/a b/run,/tmp:/tmp,{tmp_path}:/x"
    assert f"--container-mounts={mounts}" in arguments and f"--container-workdir={tmp_path}" in arguments
    assert arguments[-4:] == ["python", "-m", "hpcrl.run", "/a b/run"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["cluster.container=apptainer"], "cluster.image: missing; cluster.container=apptainer needs one"),
        (["cluster.container=apptainer", "cluster.image=gone.sif"], "cluster.image: no file gone.sif"),
        (["cluster.container=pyxis", "cluster.image=gone.sqsh"], "cluster.image: no file gone.sqsh"),
        (
            ["cluster.container=pyxis", "cluster.image=docker://x", "cluster.mounts=[/gone]"],
            "cluster.mounts: /gone is not the absolute path",
        ),
        (["cluster.image=x.sif"], "cluster.image: .*the ranks run in no container"),
    ],
)
def test_an_invalid_container_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        prepare(["+cluster=slurm", *words])


REWARD = """
import json, os
def score(items):
    with open("{seen}", "w") as file:
        json.dump(dict(os.environ), file)
    return [0.0 for _ in items]
"""


def test_modules_prologue_and_interface_apply_to_the_ranks(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    seen = tmp_path / "seen.json"
    (tmp_path / "reward.py").write_text(REWARD.format(seen=seen))
    # A function of that name, as sites have it; like theirs it reads variables that are not set.
    functions = tmp_path / "modules.sh"
    functions.write_text(f'module() {{ [ "$2" != nowhere ] && echo "$@$_UNSET" >> {tmp_path}/modules; }}\n')
    words = [
        "cluster.modules=[gcc/13.2,cuda/12.8]",
        "cluster.prologue='module load late; export SITE_SCRATCH=$NOT_SET_ANYWHERE/scratch'",
        "cluster.network_interface=lo",
        *("reward.default.name=function", f"reward.default.function={tmp_path}/reward.py:score", "max_steps=1"),
    ]
    site = WithEnviron(cluster, {"BASH_ENV": str(functions)})
    job = submit(site, tmp_path / "run", *tiny, *HETJOB, *words)
    wait_state(cluster, tmp_path / "run", job, (COMPLETED,))
    assert (tmp_path / "modules").read_text() == "load gcc/13.2 cuda/12.8\nload late\n"
    environ = json.loads(seen.read_text())
    names = ("SITE_SCRATCH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [environ[name] for name in names] == ["/scratch", "lo", "=lo"]

    job = submit(site, tmp_path / "other", *tiny, "cluster.modules=[nowhere]", "max_steps=1")
    wait_state(cluster, tmp_path / "other", job, (FAILED,))
    assert show(cluster, job)["ExitCode"] == "2:0" and not (tmp_path / "other" / "config.yaml").exists()


class WithEnviron:
    """The cluster for a user whose login shell sets more variables."""

    def __init__(self, cluster: Any, environ: dict[str, str]):
        self.environ = cluster.environ | environ
