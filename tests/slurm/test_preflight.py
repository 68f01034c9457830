"""Preflight: missing requirements of one node are named before a rank starts, on emulated Slurm nodes and in the pure
function."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.config import read
from hpcrl.node.gpus import TorchBuild
from hpcrl.node.preflight import (
    RUN_FREE_BYTES,
    SCRATCH_FREE_BYTES,
    Judgement,
    Needs,
    Report,
    _await,
    examine,
    judge,
    needs_of,
    preflight,
    read_reports,
    remark,
)
from hpcrl.run_folder import (
    CONFIG,
    FACTS,
    OUTCOME,
    close_run,
    counted_image_tokens,
    open_run,
    stored_config,
    world_folder,
)
from hpcrl.system import files
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import find_room, no_room_for
from tests.disks import small_file_system
from tests.gpu_nodes import FREE, GpuNode

COMPONENTS = (
    "{first: {roles: [controller, trainer], ranks_per_node: 1}, rest: {roles: [generator, reward], ranks_per_node: 2}}"
)


def make_run(folder: Path, *words: str, start_s: float = 60) -> Path:
    """A run folder for three nodes: ranks 0 and 1; 2 and 3; 4 and 5."""
    reading = read(
        [
            "+cluster=slurm",
            "layout=disaggregated",
            "layout.trainer.num_ranks=1",
            "layout.generator.num_ranks=2",
            "layout.reward.num_ranks=2",
            f"cluster.components={COMPONENTS}",
            "data.train=task:sort_digits",
            f"timeouts.start_s={start_s}",
            f"run_dir={folder}",
            *words,
        ]
    )
    assert reading.config is not None, reading.lines()
    close_run(folder, open_run(reading.config.model_dump(mode="json"), folder, "auto").attempt)
    return folder


def srun(cluster: Any, run: str, prelude: str = "", module: str = "node.preflight") -> tuple[int, list[str], float]:
    """Exit code, hpcrl's messages and seconds of one process on each of three nodes, after `prelude`."""
    script = f"{prelude}\nexec {sys.executable} -m hpcrl.{module} {run}"
    command = ["srun", "-N3", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--exclusive", "bash", "-c", script]
    began = time.monotonic()
    done = subprocess.run(command, env=cluster.environ, capture_output=True, text=True, timeout=90, check=False)
    seconds = time.monotonic() - began
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("srun:")]
    return done.returncode, lines, seconds


@pytest.mark.slow
def test_good_nodes_report_their_properties(cluster: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    code, lines, _ = srun(cluster, str(run))
    assert code == 0 and len(lines) == 3, lines
    reports = read_reports(run / "world")
    assert [(report.name, report.ranks) for report in reports] == [("n1", [0, 1]), ("n2", [2, 3]), ("n3", [4, 5])]
    assert all(report.versions["torch"] and report.open_files >= 64 + 8 * 6 for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prelude", "told"),
    [
        ("[ $SLURMD_NODENAME = n2 ] && ulimit -n 80", "node n2 allows 80 open files, but the run needs 112"),
        ("[ $SLURMD_NODENAME = n3 ] && export TMPDIR=/no/such", "node n3 cannot write to its scratch /no/such"),
        ("[ $SLURMD_NODENAME != n1 ] && export TMPDIR=/no", "each of the nodes n2, n3 cannot write to its scratch /no"),
        ("[ $SLURMD_NODENAME = n2 ] && export PYTHONPATH=FAKE", "node n2 has torch 0.1, but other nodes have "),
        (
            "[ $SLURMD_NODENAME = n2 ] && taskset -p 1 $$ >/dev/null",
            "node n2 lets the step use 1 CPU(s) of the 2 that the job requests: srun --cpu-bind=none",
        ),
    ],
)
def test_a_bad_node_is_named_once(cluster: Any, tmp_path: Path, prelude: str, told: str) -> None:
    fake = tmp_path / "fake" / "torch-0.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n")
    run = make_run(tmp_path / "run")
    code, lines, _ = srun(cluster, str(run), prelude.replace("FAKE", str(fake.parent)))
    assert code == ExitCode.BAD_INPUT and len(lines) == 1, lines
    assert lines[0].startswith(f"hpcrl: {told}")


@pytest.mark.slow
def test_no_rank_starts_if_one_node_is_bad(cluster: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    code, lines, _ = srun(cluster, str(run), "[ $SLURMD_NODENAME = n2 ] && ulimit -n 80", "run")
    assert code == ExitCode.BAD_INPUT and len(lines) == 1 and "node n2 allows 80" in lines[0]
    assert json.loads((world_folder(run, 1) / OUTCOME).read_text()) == {"code": ExitCode.BAD_INPUT}
    assert not list((run / "logs").rglob("rank_*.log"))


@pytest.mark.slow
def test_a_misspelt_interface_is_named(cluster: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "cluster.network_interface=ib9")
    code, lines, _ = srun(cluster, str(run))
    assert code == ExitCode.BAD_INPUT and len(lines) == 1, lines
    assert re.fullmatch(
        "hpcrl: each of the nodes n1, n2, n3 has no interface ib9 that is up and has an address; it has .*lo.*: "
        "cluster.network_interface",
        lines[0],
    )


@pytest.mark.slow
def test_a_node_with_too_few_gpus_is_named(cluster: Any, tmp_path: Path) -> None:
    gpus = COMPONENTS.replace("ranks_per_node: 2}", "ranks_per_node: 2, gpus_per_node: 2}")
    run = make_run(tmp_path / "run", f"cluster.components={gpus}")
    node = GpuNode(tmp_path / "node")
    names = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "FAKE_GPUS", "FAKE_CUDA", "FAKE_SMI")
    show = "".join(f"export {name}={node.environ[name]}; " for name in names)
    code, lines, _ = srun(cluster, str(run), show)
    assert code == 0, lines
    code, lines, _ = srun(
        cluster, str(run), show + "[ $SLURMD_NODENAME = n2 ] && export CUDA_VISIBLE_DEVICES=NoDevFiles"
    )
    assert code == ExitCode.BAD_INPUT and len(lines) == 1
    assert lines[0].startswith("hpcrl: node n2 has no GPU for 2 rank(s) that hold a model, since CUDA_")
    code, lines, _ = srun(cluster, str(run), show + "[ $SLURMD_NODENAME = n2 ] && export FAKE_CUDA=12080")
    assert code == ExitCode.BAD_INPUT and len(lines) == 1
    assert lines[0].startswith(
        "hpcrl: node n2 has a driver for CUDA 12.8, but torch 2.13.0+cu130, a build for CUDA 13.0"
    )
    code, lines, _ = srun(cluster, str(run), show + "[ $SLURMD_NODENAME = n3 ] && export CUDA_VISIBLE_DEVICES=0")
    assert code == ExitCode.BAD_INPUT
    assert lines == ["hpcrl: node n3 shows 1 GPU(s) of the 2 that the run requests: add it to cluster.exclude"]


@pytest.mark.slow
def test_a_node_that_never_reports_is_named(cluster: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", start_s=3)
    code, lines, seconds = srun(cluster, str(run), "[ $SLURMD_NODENAME = n3 ] && sleep 8")
    assert code == ExitCode.DEADLINE and "node n3 did not report within 3 s" in lines[0], lines
    assert seconds < 30


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_is_named(cluster: Any, tmp_path: Path) -> None:
    """Each node sees a folder of its own under the same name; the third has none."""
    for name in ("n1", "n2", "n3"):
        (tmp_path / name).mkdir()
    make_run(tmp_path / "n1" / "run", start_s=3)
    shutil.copytree(tmp_path / "n1" / "run", tmp_path / "n2" / "run")
    code, lines, _ = srun(cluster, "run", f"cd {tmp_path}/$SLURMD_NODENAME")
    assert code != 0
    assert any(line.startswith("hpcrl: node n3 sees no run/config.yaml: put run_dir on") for line in lines), lines
    assert any("nodes n2, n3 did not report within 3 s" in line for line in lines), lines
    assert any("node n2 found no run/world" in line and "not on a file system that" in line for line in lines), lines


@pytest.mark.slow
def test_an_outdated_configuration_on_a_node_is_named(cluster: Any, tmp_path: Path) -> None:
    """As a network file system may still show it; everything else is in order."""
    make_run(tmp_path / "n1" / "run", start_s=8)
    (tmp_path / "n1" / "run" / "world").mkdir()
    for name in ("n2", "n3"):
        own = tmp_path / name / "run"
        own.mkdir(parents=True)
        (own / "world").symlink_to(tmp_path / "n1" / "run" / "world")
        shutil.copy(tmp_path / "n1" / "run" / CONFIG, own / CONFIG)
    older = tmp_path / "n3" / "run" / CONFIG
    older.write_text(older.read_text().replace("max_steps: 100", "max_steps: 99"))
    code, lines, _ = srun(cluster, "run", f"cd {tmp_path}/$SLURMD_NODENAME")
    assert code == ExitCode.BAD_INPUT
    assert len(lines) == 1 and lines[0].startswith("hpcrl: node n3 reads another config.yaml than the first"), lines


@pytest.mark.slow
def test_a_wrong_number_of_nodes_is_refused(cluster: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "layout.reward.num_ranks=6")
    code, lines, _ = srun(cluster, str(run))
    assert code == ExitCode.BAD_INPUT
    assert lines == ["hpcrl: the step runs on 3 node(s), the layout places its ranks on 5"]


GOOD = Report(
    *("x", 0, "n1", [0], {"python": "3.11.2", "torch": "2.13"}, 8, 1000, RUN_FREE_BYTES, "/tmp", 1 << 30, 4, 64),
    host="h1",
    address="10.0.0.1",
)
NEED = Needs((0,), gpus=8, open_files=1000, cpus=4)


def test_problems_of_several_nodes_are_judged_together() -> None:
    assert judge([GOOD] * 3, [NEED] * 3) == ""
    reports = [GOOD, *(msgspec.structs.replace(GOOD, name=f"n{i}") for i in range(2, 20))]
    assert judge(reports, [dataclasses.replace(NEED, gpus=9)] * 19).startswith(
        "each of the nodes n1, n2, n3, n4, n5, n6, n7, n8 and 11 more shows 8 GPU(s) of the 9"
    )
    full = msgspec.structs.replace(
        GOOD, name="n2", run_free_bytes=RUN_FREE_BYTES - 1, scratch_free_bytes=SCRATCH_FREE_BYTES - 1
    )
    line = judge([GOOD, full, GOOD], [NEED] * 3)
    assert (
        line.count("node n2 has 1,023 MiB free in the run folder") == 1 and "its scratch /tmp, but needs 64 MiB" in line
    )


def test_engine_versions_are_compared_only_on_nodes_that_need_them() -> None:
    """Nodes without a model need none."""
    need = dataclasses.replace(
        NEED, modules={"vllm": "vllm"}, required_versions={"vllm": "0.32."}, tested_versions={"deepspeed": "0.19"}
    )
    found = [
        msgspec.structs.replace(GOOD, versions=GOOD.versions | {"vllm": v}) for v in ("0.32.0", "0.32.0", "0.31.1")
    ]
    assert judge([*found[:2], GOOD], [need, need, NEED]) == ""
    assert "has vllm 0.31.1, but other nodes have 0.32.0: use one environment" in judge(found, [need] * 3)
    line = judge([found[0], GOOD], [need] * 2)
    assert "has no vllm, which the run needs; install it there: " in line and "vllm==0.32.*" in line
    line = judge(found[2:], [need])
    assert line.startswith(
        "node n1 has vllm 0.31.1, but hpcrl's part for it is written for 0.32.*; install that there: "
    )
    assert re.search(r" -m pip install -c \S+/constraints.txt 'vllm==0.32.\*'$", line)
    assert remark(found[:2], [need, need]) == ""
    older = msgspec.structs.replace(GOOD, versions=GOOD.versions | {"deepspeed": "0.18.1"})
    assert remark([older], [need]) == "deepspeed 0.18.1 is installed on the nodes, but hpcrl is written for 0.19*"


def test_a_gpu_note_of_several_nodes_is_printed_once() -> None:
    hidden = [msgspec.structs.replace(GOOD, name=name, gpu_note="computes on the CPU: X") for name in ("n2", "n3")]
    assert remark([GOOD, *hidden], [NEED] * 3) == "each of the nodes n2, n3 computes on the CPU: X"


@pytest.mark.slow
def test_gpu_packages_are_required_only_on_nodes_with_gpus(tmp_path: Path) -> None:
    need = dataclasses.replace(NEED, gpus=0, gpu_modules={"transformer_engine": "use the image"})
    without = msgspec.structs.replace(GOOD, gpus=0)
    has = msgspec.structs.replace(GOOD, versions=GOOD.versions | {"transformer_engine": "2.9"})
    assert judge([has, without], [need, need]) == ""
    line = judge([has, msgspec.structs.replace(GOOD, name="n2")], [need, need])
    assert line == (
        "node n2 has GPUs but no transformer_engine, which the run needs on GPUs; install it there: use the image"
    )
    for device, asked in (("cuda", True), ("auto", True), ("cpu", False)):
        run = make_run(tmp_path / device, f"cluster.device={device}", "trainer.engine=megatron")
        of_nodes = [bool(needs.gpu_modules) for needs in needs_of(stored_config(run))]
        assert of_nodes == [asked, asked, False], "the last node has no model"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path, 8) as folder:
        yield folder


@pytest.mark.slow
def test_concurrent_preflights_do_not_count_each_others_reservations_as_used_space(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six processes, with room for one reservation at a time."""
    code = f"""
from pathlib import Path
from hpcrl.system.files import find_room
input()
for _ in range(50):
    free, refused = find_room(Path({str(small_disk)!r}), 5 << 20, reserve=True)
    print(refused or free >= 5 << 20)
"""
    command = [sys.executable, "-c", code]
    runs = [subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(6)]
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("\n")
        run.stdin.flush()
    found = Counter(line for run in runs for line in run.communicate(timeout=60)[0].splitlines())
    assert found == {"True": 300}
    # Used space stays used.
    monkeypatch.setattr(files, "CONTENDED_S", 0.3)
    (small_disk / "checkpoint").write_bytes(bytes(4 << 20))
    assert find_room(small_disk, 5 << 20, reserve=True) == (4 << 20, "")


@pytest.mark.slow
def test_free_space_is_checked_again_after_a_pause_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CONTENDED_S", 1.0)
    looks: list[int] = []

    def look(folder: Path, num_bytes: int) -> str:
        looks.append(1)
        time.sleep(1.2 if len(looks) == 1 else 0.0)
        return "" if len(looks) == 3 else "No space left on device"

    monkeypatch.setattr(files, "no_room_for", look)
    assert find_room(tmp_path, 1, reserve=True)[1] == "" and len(looks) == 3


def test_a_quota_is_found_by_reserving_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on file sizes replaces a quota, since free space shows neither."""
    monkeypatch.setattr(files, "CONTENDED_S", 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert examine(0, NEED, tmp_path).no_room == ""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        report, other = examine(0, NEED, tmp_path), examine(1, NEED, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (report.no_room, other.no_room) == ("File too large", "")
    assert report.run_free_bytes >= RUN_FREE_BYTES and list(tmp_path.iterdir()) == []
    line = judge([msgspec.structs.replace(GOOD, no_room=report.no_room)], [NEED])
    assert line.startswith("node n1 may not write 1,024 MiB to the run folder: File too large; free some of your quota")
    assert no_room_for(tmp_path / "nowhere", 1) == "No such file or directory"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"gpus": 3}, "shows 3 GPU(s) for its 4 ranks that hold a model: .*cluster.device=cpu"),
        ({"gpus": 0}, "shows no GPU, but other nodes with trainer ranks do (node n1: 8): .*cluster.device=cpu"),
        ({"cpus": 3}, "lets the step use 3 CPU(s) of the 4 "),
        ({"cpus": 2, "machine_cpus": 2}, ""),  # an emulated node: no more than there are
        ({"config": "other"}, "reads another config.yaml than the first node"),
        ({"no_network": "has no interface ib9"}, "has no interface ib9: cluster.network_interface"),
        ({"unreached": "10.0.0.1 (timed out)"}, "cannot connect to the first node at 10.0.0.1 (timed out): "),
        ({"address": "127.0.1.1"}, "has the address 127.0.1.1, which no other node can reach"),
        ({"address": "127.0.1.1", "host": "h1"}, ""),  # emulated nodes of one host
    ],
)
def test_a_problem_of_one_node_is_named(changed: dict[str, Any], told: str) -> None:
    need = dataclasses.replace(NEED, gpus=0, all_or_none=4, all_or_none_roles=("trainer", "generator"))
    line = judge([GOOD, msgspec.structs.replace(GOOD, **{"name": "n2", "host": "h2", **changed})], [need] * 2)
    assert re.match("node n2 " + re.escape(told).replace(r"\.\*", ".*"), line) if told else line == ""


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        ([0, 0, 0, 0], ""),
        ([1, 2, 2, 0], ""),
        ([0, 2, 2, 0], ""),  # all ranks of each role agree
        ([1, 2, 0, 0], "node n3 shows no GPU, but other nodes with generator ranks do (node n2: 2): add it to "),
        ([1, 0, 4, 4], "node n2 shows no GPU, but other nodes with generator ranks do (node n3: 4): add it to "),
    ],
)
def test_ranks_of_a_role_must_have_gpus_on_all_nodes_or_on_none(tmp_path: Path, gpus: list[int], told: str) -> None:
    """A trainer on n1, generators on n2 and n3, rewards on n4."""
    words = ["layout.generator.num_ranks=4", "layout.reward.num_ranks=2"]
    needs = needs_of(stored_config(make_run(tmp_path / "run", *words)))
    assert [need.all_or_none_roles for need in needs] == [("trainer",), ("generator",), ("generator",), ()]
    names = ["n1", "n2", "n3", "n4"]
    reports = [msgspec.structs.replace(GOOD, name=n, gpus=g, cpus=64) for n, g in zip(names, gpus, strict=True)]
    line = judge(reports, needs)
    assert line.startswith(told) if told else line == ""
    assert judge(reports, needs_of(stored_config(make_run(tmp_path / "cpu", *words, "cluster.device=cpu")))) == ""


@pytest.mark.slow
def test_waiting_for_other_nodes_ignores_a_pause_of_the_job() -> None:
    looks: list[int] = []

    def look() -> str | None:
        looks.append(1)
        time.sleep(1.2 if len(looks) == 2 else 0.0)
        return "found" if len(looks) == 3 else None

    assert _await(look, 1.0, ()) == "found"
    assert _await(lambda: None, 0.1, ()) is None


def test_an_invalid_report_is_named(tmp_path: Path) -> None:
    meeting = tmp_path / "preflight" / "1.0.0"
    meeting.mkdir(parents=True)
    (meeting / "node_00000.json").write_bytes(msgspec.json.encode({"nonce": 3}))
    with pytest.raises(msgspec.ValidationError):
        read_reports(tmp_path)


@pytest.mark.slow
def test_the_preflight_can_be_run_by_hand_on_this_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    command = [sys.executable, "-m", "hpcrl.node.preflight", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0 and "ranks [0, 1]" in done.stdout, done.stderr
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env={"TMPDIR": "/no"})
    assert done.returncode == ExitCode.BAD_INPUT and "cannot write to its scratch /no" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("console")
def test_a_signal_ends_the_gpu_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, node = make_run(tmp_path / "run", "cluster.device=cuda"), GpuNode(tmp_path / "node")
    node.smi([FREE.format(0).replace(" 4,", " 9000,")])
    for name, value in node.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(TorchBuild, "installed", lambda: TorchBuild("2.13.0+cu130", "13.0", ""))
    came: list[int] = []
    threading.Timer(5.0, came.append, [signal.SIGTERM]).start()
    began = time.monotonic()
    judgement = preflight(stored_config(run), run, tmp_path / "meeting", 0, 3, came)
    assert judgement == Judgement(ExitCode.TERMINATED, "ended by SIGTERM before the ranks were started")
    assert time.monotonic() - began < 18
    assert f"node {os.uname().nodename} waits up to 20 s for GPUs that others use" in capfd.readouterr().out


def test_a_damaged_engine_installation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is unknown, so the report has none."""
    (tmp_path / "vllm-0.32.1.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    needs = dataclasses.replace(NEED, gpus=0, open_files=0, cpus=0, modules={"vllm": "vllm"})
    report = examine(0, needs, tmp_path)
    assert report.versions["vllm"] == ""
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_each_rank_with_a_model_requires_a_gpu(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "cluster.device=cuda")
    assert [need.gpus for need in needs_of(stored_config(run))] == [1, 2, 0], "a trainer; two generators; rewards"


def test_nodes_need_memory_for_the_images_that_the_launch_counted(tmp_path: Path) -> None:
    """A prompt may have 64 tokens of images, each of 28 x 28 pixels; the controller holds 16 prompts. Here none has."""
    words = ("model.tiny.architecture=qwen2_5_vl", "data.max_prompt_tokens=64", "rollout.num_prompts=16")
    run = make_run(tmp_path / "run", *words)
    assert counted_image_tokens(run) is None and counted_image_tokens(tmp_path) is None
    close_run(run, open_run(stored_config(run).model_dump(mode="json"), run, "auto", image_tokens=0).attempt)
    assert counted_image_tokens(run) == 0
    assumed, counted = (needs_of(stored_config(run), tokens)[0].memory_bytes for tokens in (None, 0))
    assert assumed - counted >= 16 * 64 * 28 * 28 * 3
    (run / FACTS).write_text("[")
    assert counted_image_tokens(run) is None


def test_the_limit_of_open_files_follows_from_connected_ranks(tmp_path: Path) -> None:
    words = ["layout.trainer.num_ranks=1", "layout.generator.num_ranks=2", "layout.reward.num_ranks=400"]
    components = COMPONENTS.replace("[controller, trainer]", "[controller]").replace("[gen", "[trainer, gen")
    run = make_run(tmp_path / "run", *words, f"cluster.components={components}")
    needs = needs_of(stored_config(run))
    assert [need.ranks for need in needs[:4]] == [(0,), (1, 2), (3, 4), (5, 6)]
    # Controller and generators connect to all 404 ranks; a reward to the controller and the generators.
    assert [need.open_files for need in needs[:4]] == [64 + 8 * 404, 64 + 8 * 404, 64 + 8 * 404, 64 + 8 * 3]
    assert needs[-1].open_files == 64 + 8 * 3


@pytest.mark.slow
def test_a_preflight_by_hand_without_a_run_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpcrl.node.preflight", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == ExitCode.BAD_INPUT
    assert f"sees no {tmp_path / CONFIG}" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_hanging_node_does_not_block_the_job(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    """The second component's agent hangs before it reports: the attempt ends, and so does the job."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if os.environ.get('SLURMD_NODENAME') == 'n2' and 'hpcrl.run' in sys.orig_argv: time.sleep(300)\n"
    )
    run = tmp_path / "run"
    words = [word for word in tiny if not word.startswith("layout")]
    components = "{first: {roles: [controller, trainer, generator]}, rest: {roles: [reward]}}"
    words += ["+cluster=slurm", "max_steps=1", f"run_dir={run}", "timeouts.start_s=3", "cluster.max_restarts=0"]
    words += ["layout=disaggregated", "layout.trainer.num_ranks=1", "layout.generator.num_ranks=1"]
    words += [f"cluster.components={components}"]
    words += [f"cluster.prologue='export PYTHONPATH={tmp_path}'"]
    command = [sys.executable, "-m", "hpcrl.launch", *words]
    done = subprocess.run(command, env=cluster.environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 60
    while cluster.run("squeue", "-h").strip():
        assert time.monotonic() < deadline, cluster.run("squeue")
        time.sleep(0.2)
    log = next((run / "slurm").glob("job-*.log")).read_text()
    assert "node n2 did not report within 3 s" in log and "cluster.max_restarts is 0" in log, log
