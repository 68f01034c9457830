"""The limits of a run on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import check_placement
from hpcrl.config import load
from hpcrl.launch.__main__ import main
from hpcrl.launch.machine import MAX_PER_CPU, check_machine, device_row, machine_notes
from hpcrl.launch.resources import check_host_memory, size
from hpcrl.models.families import read_shape
from hpcrl.node.devices import VISIBLE
from hpcrl.node.host_memory import memory_limit
from hpcrl.node.preflight import examine, judge, needs_of
from hpcrl.planner.memory import PROGRAM_BYTES
from hpcrl.spec.extras import without
from hpcrl.system.exit_codes import ExitCode

ROOM = MAX_PER_CPU * len(os.sched_getaffinity(0))


def check(*words: str) -> list[str]:
    config = load(words)
    layout = RoleLayout.from_config(config)
    return [problem.text for problem in (*check_placement(config, layout), *check_machine(config, layout))]


def test_more_processes_than_cores_can_run_are_refused_in_one_line() -> None:
    assert check(f"layout.trainer.num_ranks={ROOM - 1}") == []
    (line,) = check(f"layout.trainer.num_ranks={ROOM}")
    assert line.startswith(f"cluster: {ROOM + 1} ranks x 1 threads = {ROOM + 1:,} on this machine of ")
    assert line.endswith(f"whose limit is {ROOM}; request fewer, or set cluster.oversubscribe=true")
    assert check(f"layout.trainer.num_ranks={ROOM}", "cluster.oversubscribe=true") == []
    assert check(f"layout.trainer.num_ranks={ROOM}", "+cluster=slurm") == [], "that is the nodes' matter"


def test_a_plan_for_other_machines_is_not_limited_by_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["+experiment=demo", f"layout.trainer.num_ranks={ROOM}"]
    assert main([*words, "dry_run=true"]) == ExitCode.DONE, capsys.readouterr().err
    note = rf"^ {{8}}note: this machine refuses a start: {ROOM + 1} ranks x 1 threads = .+, whose limit is {ROOM}$"
    assert len(re.findall(note, capsys.readouterr().out, re.M)) == 1
    assert main([*words, "dry_run=true", "cluster.oversubscribe=true"]) == ExitCode.DONE
    assert "refuses a start" not in capsys.readouterr().out
    assert main(words) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err.startswith(f"cluster: {ROOM + 1} ranks x 1 threads = ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("gpus", "device", "refused"), [("0", "auto", True), ("0", "cpu", False), ("", "auto", False)])
def test_a_missing_gpu_package_of_an_engine_is_refused_only_on_gpu_machines(
    gpus: str, device: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, gpus)
    with without("transformer_engine"):
        config = load(["trainer.engine=megatron", f"cluster.device={device}"])
        layout = RoleLayout.from_config(config)
        found = [problem.text for problem in check_machine(config, layout)]
        assert [f"note: this machine refuses a start: {text}" for text in found] == [*machine_notes(config, layout)]
    found = [text for text in found if text.startswith("trainer.engine")]  # torch here may be a build for CPUs
    assert len(found) == refused
    for text in found:
        assert re.fullmatch(
            r"trainer.engine: megatron is not fully installed; on a GPU it needs transformer_engine: .*pip install .*"
            r"env/apptainer/megatron.def; or set cluster.device=cpu",
            text,
        )


def test_threads_and_processes_of_rewards_and_environments_count() -> None:
    reward = "reward={default: {name: math, num_processes: %d}}"
    assert check(reward % ((ROOM - 3) // 2)) == []
    (line,) = check(reward % ROOM, "env=scripted", "env.default.num_threads=7", "cluster.threads_per_rank=2")
    total = 3 * 2 + 2 * ROOM + 2 * 7
    assert f"2 reward ranks x {ROOM} processes of default + 2 env ranks x 7 threads of default = {total:,} on" in line


def test_the_number_of_ranks_per_node_is_limited() -> None:
    (line,) = check("+cluster=slurm", "layout.trainer.num_ranks=2000")
    assert line.startswith(
        "cluster.components: 2001 ranks are more than one node can hold; set cluster.components.main"
    )


def test_a_node_requests_a_gpu_for_each_rank_with_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+cluster=slurm", "layout.trainer.num_ranks=4", "+cluster.components.all.ranks_per_node=2"]
    (line,) = check(*words, "+cluster.components.all.gpus_per_node=1")
    assert line == (
        "cluster.components.all.gpus_per_node: 1 for 2 ranks of a node that hold a model; request 2, or set "
        "cluster.device=cpu"
    )
    assert check(*words, "+cluster.components.all.gpus_per_node=2") == []
    assert check(*words, "+cluster.components.all.gpus_per_node=1", "cluster.device=cpu") == []
    for given, note in (
        (["+cluster.components.all.gpus_per_node=1", "cluster.device=cpu"], "cluster.device=cpu leaves the GPU(s) of"),
        (["cluster.device=cuda"], "cluster.device=cuda, but the job requests no GPU: set gpus_per_node of a component"),
    ):
        assert main([*words, *given, "dry_run=true"]) == ExitCode.DONE
        assert f"  note: {note}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "gpus", "row"),
    [
        ([], "", "auto: the CPU, since CUDA_VISIBLE_DEVICES names no GPU"),
        ([], "0,1,2", "auto: 2 of 3 GPU(s)"),
        (["cluster.device=cpu"], "0,1,2", "cpu (cluster.device)"),
        (
            ["+cluster=slurm"],
            "0",
            "auto: GPUs on nodes with a GPU for each rank with a model, the CPU on",
        ),
    ],
)
def test_the_plan_shows_on_which_device_models_are(
    words: list[str], gpus: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, gpus)
    config = load(words)
    assert device_row(config, RoleLayout.from_config(config)).startswith(row)


LARGE = ["+experiment=demo", "model.tiny.hidden_size=16384", "model.tiny.num_layers=80", "model.tiny.num_heads=128"]


def test_a_plan_beyond_local_memory_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(LARGE) == ExitCode.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    there = re.escape(size(memory_limit()[0]))
    assert re.match(
        rf"cluster: the plan needs .+iB of host memory for rank\(s\) 0-2, .+ is {there}: see dry_run=", line
    )
    assert not list(tmp_path.iterdir())
    assert main([*LARGE, "dry_run=true"]) == ExitCode.DONE, "a plan may be for another machine"
    assert "which is not enough" in capsys.readouterr().out


def test_a_plan_beyond_the_memory_key_is_refused() -> None:
    def problems(*words: str) -> list[str]:
        config = load(["+cluster=slurm", *words])
        shape = read_shape(config.model.tiny.hf_config())
        return [problem.text for problem in check_host_memory(config, RoleLayout.from_config(config), shape)]

    component = "cluster.components={cpu: {roles: [controller, trainer], memory: %s}}"
    assert problems(component % "4G") == []
    (line,) = problems(component % "500M")
    assert line.startswith("cluster.components.cpu.memory: the plan needs ") and "its memory key is 500 MiB" in line
    assert problems(component % "500M", "cluster.oversubscribe=true") == []
    assert problems("cluster.components={cpu: {roles: [controller, trainer]}}") == []


def test_a_node_with_too_little_memory_is_named(tmp_path: Path) -> None:
    config = load(["+experiment=demo", "cluster.device=cpu"])
    (need,) = needs_of(config)
    assert need.memory_bytes == pytest.approx(2 * PROGRAM_BYTES, rel=0.5)
    report = examine(0, need, tmp_path)
    report.name, report.memory_bytes = "n1", need.memory_bytes
    assert judge([report], [need]) == ""
    report.memory_bytes -= 1 << 20
    assert "n1 gives the job " in judge([report], [need]) and "raise the memory key" in judge([report], [need])
    report.memory_bytes = 0  # unknown
    assert judge([report], [need]) == ""
