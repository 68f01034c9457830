"""This version continues run folders and checkpoints of the last version. tests/fixtures/README.md says what they are;
configuration keys, metrics and stored fields have the names of that version in them."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hpcrl.commands import status
from hpcrl.config import Config
from hpcrl.convert.__main__ import main as convert
from hpcrl.launch.__main__ import main as launch
from hpcrl.metrics.log import METRICS, read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.rollout.types import PromptOutcome
from hpcrl.run_folder import read_finished, stored_config
from hpcrl.run_folder.records import read_attempts
from hpcrl.spec.trajectory import FIELDS
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import step_name
from tests import in_process
from tests.conftest import ROOT

pytestmark = pytest.mark.timeout(180)

ARCHIVE = ROOT / "tests" / "fixtures" / "runs_0_1.tar.xz"
NUM_STEPS, MAX_STALENESS = 6, 1
MODELS = {"ahead": ("hf",), "ppo": ("hf", "hf_critic"), "episodes": (), "sft": ("hf",), "fake": ()}
"""Run -> the models to which its checkpoint is converted: none if it has adapters, or no model at all."""
NEEDS = {"ppo": "deepspeed", "sft": "megatron"}
"""Run -> the package of its trainer, which is an extra."""
MESSAGES = {"ahead": {3}, "ppo": {2}, "episodes": {2, 4, 6}, "fake": {2, 4}}
"""Run with rollouts -> numbers of messages in them: of the system, prompt, and turns with what the environment says."""

RENAMED: dict[str, str] = {}
"""Metric -> its name in the last version, where that was another one."""
ADAPTED = ("actor/kl_scale", "actor/entropy_coef")
"""Metrics of the numbers that the algorithm of `ahead` adapts; its checkpoint has them under the same names."""
COUNTED = ("critic/rewards/mean", "token/response_length/mean", "prompts/trained", "val/score/mean")
"""Metrics of random rewards, of tokens and of prompts."""
SAME = {
    "ppo": {
        **dict.fromkeys(COUNTED, 1e-9),
        "actor/lr": 1e-9,
        "critic/lr": 1e-9,
        "critic/loss": 1e-3,
        "critic/kl": 1e-2,
    },
    "episodes": {**dict.fromkeys(COUNTED, 1e-9), "env/lake/turns": 1e-9, "actor/grad_norm": 1e-2},
    "sft": {"sft/loss": 1e-4, "actor/lr": 1e-9, "actor/grad_norm": 1e-2},
    "fake": {**dict.fromkeys(COUNTED, 1e-9), "critic/advantages/max": 1e-5, "critic/advantages/min": 1e-5},
}
"""Run in which nothing depends on time -> metrics that are those of the same run without a stop, and their relative
tolerance: processors round differently."""

SETTINGS: dict[str, dict[str, Any]] = {
    "ahead": {
        "max_steps": NUM_STEPS,
        "save_every": 50,
        "eval_every": 2,
        "keep_checkpoints": 3,
        "seed": 3,
        "trackers": ["tensorboard"],
        "model.tiny.vocab_size": 270,
        "model.tiny.initializer_range": 0.1,
        "data.max_prompt_tokens": 48,
        "data.overlong_prompts": "truncate",
        "data.system_prompt": "Sort.",
        "data.domain_key": "domain",
        "data.domain_interleave_probs": {"digits": 0.75, "sums": 0.25},
        "rollout.num_prompts": 4,
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 6,
        "rollout.temperature": 0.9,
        "rollout.top_p": 0.95,
        "rollout.top_k": 200,
        "rollout.min_p": 0.001,
        "rollout.stop": ["zz"],
        "rollout.max_staleness": MAX_STALENESS,
        "rollout.on_new_weights": "recompute",
        "rollout.extra_prompts": 1,
        "rollout.extra_members": 1,
        "rollout.group_affinity": False,
        "rollout.prompt_affinity": True,
        "rollout.routing": "expected_length",
        "rollout.speed_aware_routing": False,
        "rollout.max_attempts": 4,
        "rollout.filter_mean_low": 0.1,
        "rollout.filter_std": True,
        "rollout.domains.sums.max_new_tokens": 4,
        "rollout.max_generated_groups": 300,
        "algorithm.advantage_estimator": "grpo",
        "algorithm.std_eps": 1e-5,
        "algorithm.whiten_advantages": True,
        "algorithm.pg_clip_low": 0.1,
        "algorithm.pg_clip_high": 0.3,
        "algorithm.dual_clip": 3,
        "algorithm.loss_aggregation": "seq-mean-token-mean",
        "algorithm.kl_loss_coef": 0.1,
        "algorithm.kl_loss_estimator": "k3",
        "algorithm.kl_target": 1e-4,
        "algorithm.kl_horizon": 500,
        "algorithm.ref_update_steps": 2,
        "algorithm.entropy_loss_coef": 0.01,
        "algorithm.entropy_target": 9,
        "algorithm.entropy_coef_step": 0.003,
        "algorithm.entropy_share": 0.8,
        "algorithm.reward_clip": 2,
        "algorithm.advantage_clip": 4,
        "algorithm.correction": "mask",
        "algorithm.correction_level": "geometric",
        "algorithm.correction_low": 0.25,
        "algorithm.correction_high": 4,
        "algorithm.correction_normalize": True,
        "algorithm.rejection_level": "token",
        "algorithm.rejection_low": 0.01,
        "algorithm.rejection_high": 100,
        "algorithm.off_policy_mask": 0.5,
        "algorithm.difficulty_loss_weight": True,
        "algorithm.length_loss_weight": True,
        "algorithm.ppo_epochs": 2,
        "algorithm.num_mini_batches": 2,
        "reward.digits.name": "composed",
        "reward.digits.timeout_s": 60,
        "reward.sums.options": {"pass_rate": 0.4, "latency_s": 0.1},
        "trainer.lr_warmup_steps": 4,
        "trainer.weight_decay": 0.02,
        "trainer.betas": (0.8, 0.95),
        "trainer.eps": 1e-6,
        "trainer.max_grad_norm": 0.7,
        "trainer.max_tokens_per_micro_batch": 1024,
        "trainer.max_mismatch": 0.5,
        "trainer.logits_chunk_tokens": 128,
        "trainer.fsdp2.packing": "off",
        "generator.max_num_seqs": 6,
        "generator.max_requests": 40,
        "generator.decode_chunk_tokens": 2,
        "generator.native.block_tokens": 16,
        "generator.native.kv_cache_gib": 0.01,
        "eval.num_prompts": 4,
        "eval.temperature": 0.5,
        "eval.max_new_tokens": 5,
        "eval.num_examples": 2,
        "layout.trainer.num_ranks": 1,
        "layout.generator.num_ranks": 1,
        "layout.generator.colocate_with": None,
        "layout.reward.colocate_with": "generator",
        "timeouts.start_s": 290,
        "timeouts.command_s": 310,
        "timeouts.grace_s": 11,
        "timeouts.store_s": 29,
        "cluster.device": "cpu",
        "cluster.max_restarts": 2,
        "cluster.storage_gb_per_s": 3,
    },
    "ppo": {
        "deterministic": True,
        "data.shuffle": False,
        "algorithm.advantage_estimator": "gae",
        "algorithm.gamma": 0.98,
        "algorithm.lambd": 0.9,
        "algorithm.whiten_rewards": True,
        "algorithm.kl_reward_coef": 0.05,
        "algorithm.kl_reward_estimator": "k2",
        "critic.lr": 3e-3,
        "critic.lr_schedule": "linear",
        "critic.min_lr": 1e-4,
        "critic.lr_warmup_steps": 2,
        "critic.weight_decay": 0.01,
        "critic.value_clip": 0.4,
        "critic.warmup_steps": 1,
        "critic.max_grad_norm": 0.9,
        "trainer.engine": "deepspeed",
        "trainer.deepspeed.zero_stage": 2,
        "trainer.deepspeed.packing": "off",
        "trainer.lr_schedule": "cosine",
        "trainer.min_lr": 1e-4,
    },
    "episodes": {
        "pipeline": "agentic",
        "env.lake.name": "frozen_lake",
        "env.lake.max_turns": 3,
        "env.lake.episode": "steps",
        "env.lake.history": 1,
        "env.lake.add_reward": True,
        "algorithm.advantage_estimator": "gigpo",
        "algorithm.gamma": 0.9,
        "algorithm.step_weight": 0.5,
        "algorithm.std_normalize": False,
        "trainer.lora.rank": 2,
        "trainer.lora.alpha": 8,
        "trainer.lora.target_modules": ["q_proj", "v_proj"],
    },
    "sft": {
        "pipeline": "sft",
        "sft.batch_size": 8,
        "sft.stop_score": 0.99,
        "trainer.engine": "megatron",
        "trainer.megatron.recompute": "none",
        "trainer.lr_schedule": "linear",
    },
    "fake": {
        "debug": "fake",
        "env.default.name": "scripted",
        "algorithm.advantage_estimator": "reinforce",
        "algorithm.norm_mean_type": "running",
        "algorithm.norm_std_type": "running",
        "fake.median_tokens": 3,
        "fake.tail": 0.5,
        "fake.pass_rate": 0.7,
        "fake.train_s": 0.05,
    },
}
"""Run -> what its configuration says, by the keys of this version."""


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the archive. No test changes it."""
    folder = tmp_path_factory.mktemp("last")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def expected(last: Path) -> dict[str, dict[str, Any]]:
    """Run -> the step after which it was stopped, and the metrics.jsonl of the same run without a stop."""
    return json.loads((last / "expected.json").read_text())


def start_again(at: Path, name: str) -> CompletedProcess[str]:
    """The same command again, for a run folder that may have been moved."""
    first = (at / "runs" / name / "config.yaml").read_text().partition("\n")[0]
    return in_process.run(launch, *json.loads(first.removeprefix("# words: ")), at=at)


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(
        lambda at, part: at[part] if isinstance(at, Mapping) else getattr(at, part), key.split("."), config
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_a_stored_configuration_is_read(last: Path, name: str) -> None:
    config = stored_config(last / "runs" / name)
    assert {key: value_of(config, key) for key in SETTINGS[name]} == SETTINGS[name]


@pytest.mark.parametrize("name", MODELS)
def test_status(last: Path, expected: dict[str, dict[str, Any]], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = expected[name]["step"]
    assert status.main([str(last / "runs" / name)]) == ExitCode.DONE
    said = capsys.readouterr().out
    measured = "loss" if name == "sft" else "reward"
    assert f"\nstep     {step} of {NUM_STEPS}  {measured} " in said and " steps/min\n" in said
    assert f"\nsaved    step {step}, " in said
    assert "\nstate    stopped: attempt 1 ended " in said and "; the same command resumes it\n" in said


@pytest.mark.parametrize("name", MESSAGES)
def test_stored_rollouts_are_read(last: Path, expected: dict[str, dict[str, Any]], name: str) -> None:
    run, step, known = last / "runs" / name, expected[name]["step"], dict(FIELDS)
    reader = RolloutReader(run)
    assert reader.steps() == list(range(1, step + 1))
    for number in reader.steps():
        rollouts = reader.read(number)
        columns = rollouts.batch.check().columns
        restarts = (rollouts.batch.position_ids == 0).nonzero()[:, 0]
        assert torch.equal(rollouts.batch.cu_segments[:-1], restarts)
        (path,) = (run / "rollouts" / step_name(number)).glob("rank_*.h5")
        with h5py.File(path) as file:
            stored = [data[()] for data in file.values() if isinstance(data, h5py.Dataset)]
        read = [rollouts.batch.cu_seqlens.numpy(), *(column.numpy() for column in columns.values())]
        assert Counter(map(digest, read)) == Counter(map(digest, stored))
        assert {len(rollouts.messages(row)) for row in range(rollouts.batch.num_sequences)} <= MESSAGES[name]
        parts = {part for metrics in rollouts.metrics for part in metrics}
        assert parts >= {"ahead": {"first", "second"}, "ppo": set()}.get(name, {"turns", "return"})
    assert known == FIELDS, "a field of the last version is unknown"
    trained = [record for record in reader.outcomes() if record.outcome is PromptOutcome.TRAINED]
    assert len(trained) == 4 * step and all(len(record.rewards) == 4 for record in trained)


def digest(values: np.ndarray) -> str:
    """A digest that does not depend on the order of the values."""
    values = values.astype(np.uint8) if values.dtype == bool else values
    return hashlib.sha256(str(values.dtype).encode() + np.sort(values).tobytes()).hexdigest()


@pytest.mark.parametrize(("name", "model"), [(name, model) for name in MODELS for model in MODELS[name]])
def test_a_checkpoint_becomes_the_runs_model(
    last: Path, expected: dict[str, dict[str, Any]], tmp_path: Path, name: str, model: str
) -> None:
    """By `hpcrl.convert`; the last version exported the run's model itself."""
    checkpoint = last / "runs" / name / "checkpoints" / step_name(expected[name]["step"])
    checkpoint = checkpoint / "critic" if model == "hf_critic" else checkpoint
    done = in_process.run(convert, "--checkpoint", str(checkpoint), "--output", "out", "--verify", at=tmp_path)
    assert done.returncode == ExitCode.DONE, done.stderr
    made, held = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out", last / "held" / name / model)
    )
    assert made.keys() == held.keys()
    assert [key for key in made if not made[key].equal(held[key])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_earlier_run_resumes(
    last: Path, expected: dict[str, dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """With the same command, after the folder was moved."""
    if name in NEEDS and not find_spec(NEEDS[name]):
        pytest.skip(f"{NEEDS[name]} is not installed (extra: {NEEDS[name]})")
    step, whole, run = expected[name]["step"], expected[name]["whole"], tmp_path / "runs" / name
    shutil.copytree(last / "runs" / name, run)
    shutil.copy(last / "sft.yaml", tmp_path)
    before = (run / METRICS).read_bytes()
    done = start_again(tmp_path, name)
    said = capfd.readouterr().out
    assert done.returncode == ExitCode.DONE, said + done.stderr
    assert f"hpcrl: resumed from {step_name(step)}\nstep {step + 1}/{NUM_STEPS} " in said
    assert not [
        text for text in ("skipping step_", "lacks steps", "not the same in every bit", "could not") if text in said
    ]
    assert (run / "hf" / "model.safetensors").is_file() and (run / "plot.png").is_file()
    assert [line.partition(":")[0] for line in read_attempts(run)[-1]["changes"]] == ["run_dir"]
    assert read_finished(run)["step"] == NUM_STEPS
    rows = read_metrics(run)
    assert (run / METRICS).read_bytes().startswith(before)
    assert [row["step"] for row in rows] == [row["step"] for row in whole]
    metric, word = ("sft/loss", "loss") if name == "sft" else ("critic/rewards/mean", "reward")
    summary = re.search(rf"\n{NUM_STEPS} steps in .*  {word} (\S+) -> (\S+)", said)
    assert summary, said
    ends = [row[metric] for row in rows if row["step"] in (1, NUM_STEPS)]
    assert [float(value) for value in summary.groups()] == pytest.approx(ends, abs=1e-3)
    check_continued(name, rows, whole)
    if name == "ahead":
        old, new = {"scheduler/version_lag/max", "sums/score"}, {"scheduler/staleness/max", "domain/sums/score"}
        assert old.isdisjoint(set().union(*rows)) and new <= set().union(*rows[:step])
        check_state_was_read(last / "runs" / name / "checkpoints" / step_name(step), run, rows)
    status.main([str(run)])
    said = capfd.readouterr().out
    assert f"\nstep     {NUM_STEPS} of {NUM_STEPS}  {word} " in said and "\nrestarts 1\n" in said


def check_continued(name: str, rows: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """The resumed run has the metrics of the run without a stop, except for times."""
    for metric, tolerance in SAME.get(name, {}).items():
        here = {row["step"]: row[metric] for row in rows if metric in row}
        there = {row["step"]: row[old] for row in whole if (old := RENAMED.get(metric, metric)) in row}
        assert max(here) == NUM_STEPS and here == pytest.approx(there, rel=tolerance, abs=1e-9), metric


def check_state_was_read(checkpoint: Path, run: Path, rows: list[dict[str, Any]]) -> None:
    """The run `ahead` continued from the state in this checkpoint."""
    state, reader = json.loads((checkpoint / "state.json").read_text()), RolloutReader(run)
    (first,) = (row for row in rows if row["step"] == state["counters"]["step"] + 1)
    assert {metric: first[metric] for metric in ADAPTED} == {
        metric: state["algorithm"][RENAMED.get(metric, metric)] for metric in ADAPTED
    }
    assert first["critic/kl"] < 1e-3, "the reference is that of step 2; to the initial model the KL is .0025"
    fresh = [group for group in state["scheduler"]["finished"] if group["version"] >= first["step"] - 1 - MAX_STALENESS]
    held = {sample["id"] for group in fresh for sample in group["samples"]}
    trained = {
        sample for step in range(first["step"], NUM_STEPS + 1) for sample in reader.batch(step).sample_ids.tolist()
    }
    assert held and held <= trained, "responses that waited are not trained on"
    ended = {record.uid: record for record in reader.outcomes()}  # a prompt that ended twice is an error
    under_way = {uid for uid, *_ in state["scheduler"]["queue"]}
    assert under_way and all(ended[uid].attempt > 0 for uid in under_way), "prompts under way are not started again"
    counts = Counter(record.outcome for record in ended.values())
    assert rows[-1]["prompts/trained"] == counts[PromptOutcome.TRAINED] == 4 * NUM_STEPS
    assert rows[-1]["prompts/filtered"] == counts[PromptOutcome.FILTERED] > 0


@pytest.mark.slow
def test_stored_rollouts_can_be_trained_on(last: Path, expected: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """With the configuration that the run stored, from the weights that it began with."""
    run, step = last / "runs" / "episodes", expected["episodes"]["step"]
    words = [
        f"run_dir={tmp_path}/alone",
        "debug=train_only",
        f"load_rollouts={run}",
        f"max_steps={step}",
        "eval_every=0",
    ]
    done = in_process.run(launch, "--config", str(run / "config.yaml"), *words, at=tmp_path)
    assert done.returncode == ExitCode.DONE, done.stderr
    there, here = read_metrics(run)[1:], read_metrics(tmp_path / "alone")[1:]
    for metric in ("critic/rewards/mean", "critic/advantages/max", "actor/total_loss", "actor/grad_norm"):
        assert [row[metric] for row in here] == pytest.approx([row[metric] for row in there], rel=1e-2), metric
