"""slurm/rlvr_tiny_megatron.sbatch, which is rlvr_200b at a tiny size: a heterogeneous job that is preempted and
resumes, whose checkpoint another job converts to HF layout, compared with transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, load
from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from tests.conftest import ROOT
from tests.slurm.jobs import COMPLETED, log, show, submit, wait_state, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed (extra: megatron)"),
    pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed (extra: vllm)"),
]
NAME = "rlvr_tiny_megatron"
NUM_STEPS = 7
"""A checkpoint precedes the last one."""
TOLERANCE = 1e-5


def read(name: str) -> Config:
    return load(["+cluster=slurm", f"+experiment={name}"])


def test_the_tiny_recipe_differs_from_rlvr_200b_only_in_size() -> None:
    large, tiny = (read(name).model_dump() for name in ("rlvr_200b", NAME))
    different = {
        f"{section}.{key}"
        for section in ("algorithm", "trainer", "generator", "timeouts")
        for key in large[section]
        if large[section][key] != tiny[section][key]
    }
    assert different == {
        "trainer.lr",
        "trainer.lr_warmup_steps",
        "trainer.param_dtype",
        "trainer.max_tokens_per_micro_batch",
        "trainer.megatron",
        "generator.dtype",
    }
    sizes = {"tensor_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel"}
    ours, theirs = tiny["trainer"]["megatron"], large["trainer"]["megatron"]
    assert {key for key in theirs if ours[key] != theirs[key]} == sizes
    assert all(ours[key] == 2 for key in sizes)
    for name in ("rlvr_200b", NAME):
        layout = RoleLayout.from_config(read(name))
        trainers, generators, rewards = (set(layout.ranks[role]) for role in ("trainer", "generator", "reward"))
        assert generators < trainers and not rewards & trainers
        assert all(len(replica) > 1 for replica in layout.replicas)
        assert [*read(name).cluster.components] == ["gpu", "cpu"]


def test_the_tiny_recipe_is_preempted_and_resumes_and_its_checkpoint_is_converted(cluster: Any, tmp_path: Path) -> None:
    run_dir, job_log = tmp_path / "run", tmp_path / "job.log"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words = [str(ROOT / "slurm" / f"{NAME}.sbatch"), f"run_dir={run_dir}", f"max_steps={NUM_STEPS}"]
    done = subprocess.run(
        ["sbatch", "--parsable", f"--output={job_log}", *words],
        env={**cluster.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    job = int(done.stdout)
    began = f"step 0/{NUM_STEPS} "
    wait_until(lambda: job_log.exists() and began in job_log.read_text(), lambda: show(cluster, job)["JobState"])
    high = ["--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    cluster.run("sbatch", *high)
    wait_until(lambda: show(cluster, job)["Restarts"] == "1", job_log.read_text)
    cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now+2", check=False)  # it may run already
    wait_state(cluster, run_dir, job, [COMPLETED])
    said = job_log.read_text()
    assert "launch INFO attempt 1 ended (requeue): resumes" in said and "rank 0 INFO resumed from step_" in said, said
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    assert all(row["actor/grad_norm"] > 0 and row["mismatch/diff/max"] < TOLERANCE for row in rows[1:])

    target = tmp_path / "converted" / "hf"
    words = ["+experiment=convert", f"convert.source={run_dir}/checkpoints/step_{NUM_STEPS - 1:06d}"]
    words += [f"cluster.components.cpu.{key}" for key in ("cpus_per_node=2", "memory=2G")]
    conversion = submit(cluster, target.parent, *words, "convert.verify=true", "cluster.threads_per_rank=2")
    wait_state(cluster, target.parent, conversion, [COMPLETED])
    assert "read back and equal" in log(target.parent)
    # The last step's responses were generated with the weights of the converted checkpoint, which generators got from
    # the trainers; the exported model has one step more.
    assert furthest(target, run_dir, NUM_STEPS) < TOLERANCE
    assert furthest(run_dir / "hf", run_dir, NUM_STEPS) > 10 * TOLERANCE


def furthest(model: Path, run_dir: Path, step: int) -> float:
    """The largest difference between transformers' log-probs of a step's responses and those that were stored."""
    batch, temperature = RolloutReader(run_dir).batch(step), read(NAME).rollout.temperature
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    differences = []
    for first, last in pairwise(batch.cu_seqlens.tolist()):
        tokens, mask = batch.token_ids[first:last].long(), batch.loss_mask[first + 1 : last].bool()
        with torch.no_grad():
            logprobs = torch.log_softmax(policy(tokens[None]).logits[0, :-1] / temperature, -1)
        found = logprobs.gather(1, tokens[1:, None])[:, 0]
        differences.append((found - batch.gen_logprobs[first + 1 : last])[mask].abs().max())
    return float(max(differences))
