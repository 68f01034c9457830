"""The scripts in slurm/ on a cluster of their size: accepted, held, checked, cancelled; the tiny one runs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import Config, TinyModel, load
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.launch.__main__ import main
from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.log import message_of
from tests import in_process
from tests.conftest import ROOT
from tests.slurm.jobs import show, submit, wait_state, wait_until

RECIPES = sorted(path.stem for path in (ROOT / "slurm").glob("*.sbatch"))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def large(one_machine: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster that claims 57 nodes with 8 GPUs and 4 without: as large as the largest recipe."""
    gpu = one_machine.Nodes("g", 57, cpus=64, memory_mb=2_000_000, gpus=8)
    cpu = one_machine.Nodes("c", 4, cpus=64, memory_mb=500_000)
    with one_machine.Cluster(tmp_path_factory.mktemp("large"), [gpu, cpu]) as running:
        yield running


def script(name: str) -> Path:
    return ROOT / "slurm" / f"{name}.sbatch"


def read(name: str) -> tuple[Config, Placement]:
    config = load(["+cluster=slurm", f"+experiment={name}"])
    return config, Placement.from_config(config, RoleLayout.from_config(config))


def sbatch(large: Any, *words: str, **environ: str) -> int:
    """The (leader's) id of a job submitted by hand, with the `python` of these tests."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sbatch", "--parsable", *words],
        env={**large.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return int(done.stdout)


def hold(large: Any, *words: str, **environ: str) -> list[dict[str, str]]:
    """Submit held and cancel; returns Slurm's record of each component, in order."""
    job = sbatch(large, "--hold", *words, **environ)
    lines = large.run("scontrol", "--oneliner", "show", "job", str(job)).splitlines()
    large.run("scancel", str(job))
    found = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
    return sorted(found, key=lambda component: int(component["JobId"]))


def minutes(text: str) -> int:
    """The minutes in D-HH:MM:SS, as Slurm prints a limit."""
    days, _, clock = text.rpartition("-")
    hours, mins, _ = map(int, clock.split(":"))
    return (int(days or 0) * 24 + hours) * 60 + mins


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_requests_the_nodes_of_its_layout(large: Any, name: str) -> None:
    large.run("sbatch", "--test-only", str(script(name)))
    config, placement = read(name)
    found = hold(large, "--partition=high", str(script(name)))
    assert len(found) == len(placement.components)
    for component, shown in zip(placement.components, found, strict=True):
        gpus = component.config.gpus_per_node
        assert shown["NumNodes"].split("-")[0] == str(len(component.nodes))
        assert shown.get("TresPerNode") == (f"gres:gpu:{gpus}" if gpus else None)
        assert shown["MinMemoryNode"] == component.config.memory
        assert minutes(shown["TimeLimit"]) == minutes(config.cluster.time)
        assert (shown["Partition"], shown["JobName"], shown["Requeue"]) == ("high", f"hpcrl-{name}", "1")


def test_a_script_that_needs_more_than_the_cluster_has_is_refused(large: Any, tmp_path: Path) -> None:
    """Negative control of the test above."""
    bad = tmp_path / "bad.sbatch"
    bad.write_text(script("rlvr_200b").read_text().replace("--nodes=32", "--nodes=64"))
    with pytest.raises(RuntimeError, match="More processors requested than permitted"):
        large.run("sbatch", "--test-only", str(bad))


def test_the_two_200b_recipes_have_their_documented_sizes() -> None:
    sizes = {}
    for name in ("rlvr_200b", "rlvr_200b_disaggregated"):
        config, placement = read(name)
        sizes[name] = [(c.name, len(c.nodes), c.config.gpus_per_node) for c in placement.components]
        layout = RoleLayout.from_config(config)
        assert (len(layout.ranks["trainer"]), len(layout.ranks["generator"])) == (256, 200)
        assert [len(replica) for replica in layout.replicas] == [8] * 25
    assert sizes["rlvr_200b"] == [("gpu", 32, 8), ("cpu", 2, 0)]
    assert sizes["rlvr_200b_disaggregated"] == [("gpu", 32, 8), ("gen", 25, 8), ("cpu", 2, 0)]


def test_account_and_partition_reach_every_component(large: Any) -> None:
    file = str(script("rlvr_7b_async"))
    assert [c["Partition"] for c in hold(large, file)] == ["low"] * 3
    for found in (
        hold(large, file, SBATCH_PARTITION="high", SBATCH_ACCOUNT="physics"),
        hold(large, "--partition=high", "--account=physics", file),
    ):
        assert [(c["Partition"], c["Account"]) for c in found] == [("high", "physics")] * 3


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["cluster.components.train.gpus_per_node=8", "cluster.components.train.gpu_type=h900"], "not available"),
        (["cluster.components.gen.memory=900T"], "Memory specification can not be satisfied"),
        (["cluster.components.cpu.partition=nowhere"], "Invalid partition name specified"),
        (["cluster.exclude=nowhere"], "Invalid node name specified"),
        (["cluster.components.gen.constraint=blue"], "Invalid feature specification"),
    ],
)
def test_a_job_that_slurm_refuses_is_reported_in_one_line_and_not_queued(
    large: Any, tmp_path: Path, words: list[str], reason: str
) -> None:
    words = ["+cluster=slurm", "+experiment=rlvr_tiny", f"run_dir={tmp_path}/run", *words]
    done = in_process.run(main, *words, at=ROOT, environ=large.environ)
    assert done.returncode == ExitCode.BAD_INPUT
    (line,) = done.stderr.splitlines()
    assert reason in line
    assert large.run("squeue", "-h") == ""


def test_the_tiny_recipe_runs_to_its_end(large: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    log = tmp_path / "job.log"
    job = sbatch(large, f"--output={log}", str(script("rlvr_tiny")), f"run_dir={run_dir}")
    try:
        wait_state(large, run_dir, job, ["COMPLETED"], timeout_s=100)
    except AssertionError:
        raise AssertionError(log.read_text()) from None
    assert [row["step"] for row in read_metrics(run_dir)][-1] == 5
    assert (run_dir / "finished.json").exists() and list((run_dir / "hf").glob("*.safetensors"))


@pytest.mark.timeout(600)
def test_the_twins_without_rl_run_to_their_ends(large: Any, tmp_path: Path) -> None:
    """Each learns, scores or writes what its large recipe does."""
    student, teacher = tmp_path / "student", tmp_path / "teacher"
    make_tiny_model(TinyModel(hidden_size=32, num_heads=2), student)
    make_tiny_model(TinyModel(hidden_size=48, num_heads=2, initializer_range=0.2, seed=7), teacher)
    one = ["layout.trainer.num_ranks=1"]  # two ranks that train are dpo_tiny's
    words = {
        "distill_tiny": ["max_steps=1", f"model.path={student}", f"teacher.path={teacher}"],
        "dpo_tiny": ["max_steps=1", "eval_every=1"],
        "reward_model_tiny": ["max_steps=2", "eval_every=2", "rm.batch_size=8", "eval.num_prompts=8", *one],
        "generate_tiny": ["generate.num_prompts=8"],
    }
    for name, given in words.items():
        log = tmp_path / f"{name}.log"
        job = sbatch(large, f"--output={log}", str(script(name)), f"run_dir={tmp_path / name}", *given)
        try:
            wait_state(large, tmp_path / name, job, ["COMPLETED"])
        except AssertionError:
            raise AssertionError(log.read_text()) from None
        assert (tmp_path / name / "finished.json").exists()

    last = {name: read_metrics(tmp_path / name)[-1] for name in words if name != "generate_tiny"}
    assert last["distill_tiny"]["distill/reverse_kl"] > 1
    assert last["dpo_tiny"]["loss"] == pytest.approx(math.log(2)) and last["dpo_tiny"]["val/loss"] < math.log(2)
    assert last["reward_model_tiny"]["val/accuracy"] > 0  # a new head is zero, and counts no pair as right
    architectures = [AutoConfig.from_pretrained(tmp_path / name / "hf").architectures for name in last]
    assert architectures == [["Qwen2ForCausalLM"]] * 2 + [["Qwen2ForSequenceClassification"]]
    counts = json.loads((tmp_path / "generate_tiny" / "generation.json").read_bytes())["counts"]
    rows = (tmp_path / "generate_tiny" / "rows.jsonl").read_text().splitlines()
    assert (counts["prompts"], counts["responses"], counts["rows"]) == (8, 32, len(rows)) and rows


def test_overrides_added_by_hand_cannot_change_the_nodes(large: Any, tmp_path: Path) -> None:
    log, run_dir = tmp_path / "job.log", tmp_path / "run"
    words = [f"run_dir={run_dir}", "layout.generator.num_ranks=3"]
    job = sbatch(large, f"--output={log}", str(script("rlvr_tiny")), *words)
    wait_state(large, run_dir, job, ["FAILED"], timeout_s=60)
    (line,) = log.read_text().splitlines()
    assert message_of(line).startswith("the job has 1 + 2 + 1 nodes, the layout needs 1 + 3 + 1; submit with")
    assert not run_dir.exists()


@pytest.mark.timeout(600)
def test_a_preempted_conversion_resumes(large: Any, tmp_path: Path) -> None:
    run_dir, source, log = tmp_path / "run", tmp_path / "trained", tmp_path / "job.log"
    words = ["pipeline=sft", "layout=single", "max_steps=1", "eval_every=0", "sft.batch_size=2", "trainer.lr=1e-2"]
    wait_state(large, source, submit(large, source, *words, "data.train=task:sort_digits"), ["COMPLETED"])
    (tmp_path / "pace").write_text("0.3")
    slow_disk = {"PYTHONPATH": f"{ROOT}/tests/slow_disk:{ROOT}", "HPCRL_TEST_PACE": f"{tmp_path}/pace"}
    words = [f"run_dir={run_dir}", f"convert.source={source}", "convert.shard_gb=2e-6"]
    job = sbatch(large, f"--output={log}", str(script("convert")), *words, **slow_disk)

    def whole() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in run_dir.glob(".hf.converting/*.safetensors")}

    wait_until(lambda: len(whole()) >= 2, lambda: log.read_text() if log.exists() else "no log")
    node = show(large, job)["NodeList"]
    high = ["--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    large.run("sbatch", *high)
    wait_until(lambda: show(large, job)["Restarts"] == "1", log.read_text)
    done = whole()
    assert 2 <= len(done) < 26, "it was stopped between two files"
    (tmp_path / "pace").write_text("0")
    large.run("scontrol", "update", f"jobid={job}", "StartTime=now+2", check=False)  # it may run already
    wait_state(large, run_dir, job, ["COMPLETED"])
    said = log.read_text()
    assert "launch INFO attempt 1 ended (requeue): resumes" in said, said
    assert f" rank 0 INFO {source}/checkpoints/step_000001 -> {run_dir}/hf: 26 tensors, " in said
    assert {name: (run_dir / "hf" / name).stat().st_ino for name in done} == done, "whole files are not written again"
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf")
    expected = AutoModelForCausalLM.from_pretrained(source / "hf").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_a_job_with_a_wrong_key_says_so_and_is_not_requeued(large: Any, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    words = [f"run_dir={tmp_path / 'run'}", "pipeline=rlvr_vl"]
    job = sbatch(large, f"--output={log}", str(script("rlvr_tiny")), *words)
    wait_state(large, tmp_path / "run", job, ["FAILED"], timeout_s=60)
    (line,) = log.read_text().splitlines()
    assert message_of(line).startswith("pipeline: rlvr_vl is now rlvr, for rows with and without images")
    assert not (tmp_path / "run").exists()
    assert show(large, job)["Restarts"] == "0"
