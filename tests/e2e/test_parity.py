"""Runs on 1, 3 and 8 ranks give the same numbers, which match transformers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.files import step_name
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.numerics, pytest.mark.timeout(400)]

WORLDS = {"single": 1, "colocated": 3, "disaggregated": 8}
STEPS = (1, 2)
BETA1 = 0.9
LOGPROBS = 1e-5  # nats per token
GRADIENTS = 1e-5  # of the parameter's largest

# A KL term for the reference, one of them in the reward, so that old_logprobs are there with one optimizer step. Adam's
# epsilon is far above rounding errors, so that a gradient near zero does not turn them into a step of full size.
WORDS = """
algorithm.num_mini_batches=1 algorithm.kl_reward_coef=0.1 algorithm.kl_loss_coef=0.1 trainer.lr=1e-3 trainer.eps=1e-3
env.default.name=scripted rollout.num_prompts=8 rollout.group_size=4
rollout.max_new_tokens=4 data.max_prompt_tokens=64 generator.max_num_seqs=16 max_steps=2 save_every=1
""".split()  # noqa: SIM905


@dataclass
class Outcome:
    """Results of a run: rollouts by step, gradients and gradient norm of the first step."""

    batches: dict[int, Batch]
    gradients: dict[str, torch.Tensor]
    grad_norms: dict[int, float]


def outcome(run_dir: Path) -> Outcome:
    reader = RolloutReader(run_dir)
    rows = {row["step"]: row for row in read_metrics(run_dir)}
    return Outcome(
        {step: reader.batch(step) for step in STEPS},
        first_moments(run_dir / "checkpoints" / step_name(1)),
        {step: rows[step]["actor/grad_norm"] for step in STEPS},
    )


def first_moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Gradient (clipped) of the only optimizer step before this checkpoint, by parameter: Adam's first moment then is
    (1 - beta1) times it."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    prefix, suffix = "optimizer.state.", ".exp_avg"
    moments = {
        name.removeprefix(prefix).removesuffix(suffix): value
        for name, value in state.items()
        if name.startswith(prefix) and name.endswith(suffix)
    }
    assert moments.keys() == {name.removeprefix("model.") for name in state if name.startswith("model.")}
    return {name: moment / (1 - BETA1) for name, moment in moments.items()}


def run(layout: str, run_dir: Path, model: Path, data: Path) -> Outcome:
    words = [f"model.path={model}", f"data.train={data}", f"layout={layout}", *WORDS]
    start = Start(run_dir, words)
    assert start.wait(200) == 0, start.text
    assert len(list((run_dir / "logs" / "attempt_0001").glob("rank_*.log"))) == WORLDS[layout]
    return outcome(run_dir)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, digit_model: Path, digit_data: Path) -> dict[str, Outcome]:
    """One run per layout."""
    folder = tmp_path_factory.mktemp("parity")
    return {layout: run(layout, folder / layout, digit_model, digit_data) for layout in WORLDS}


def compare(a: Outcome, b: Outcome) -> list[str]:
    """One line per difference; empty if both agree."""
    different = []
    for step in STEPS:
        one, other = a.batches[step], b.batches[step]
        for name in ("sample_ids", "token_ids", "loss_mask", "turn_ids", "versions", "rewards", "status"):
            if not torch.equal(getattr(one, name), getattr(other, name)):
                different.append(f"step {step}: {name}")
        for name in ("gen_logprobs", "old_logprobs", "ref_logprobs"):
            x, y = getattr(one, name), getattr(other, name)
            if x.shape != y.shape or not torch.allclose(x, y, rtol=0, atol=LOGPROBS):
                different.append(f"step {step}: {name}")
    if abs(a.grad_norms[1] / b.grad_norms[1] - 1) > GRADIENTS:
        different.append(f"step 1: gradient norms {a.grad_norms[1]} and {b.grad_norms[1]}")
    assert a.gradients.keys() == b.gradients.keys()
    for name, gradient in a.gradients.items():
        deviation, largest = (gradient - b.gradients[name]).abs().max(), gradient.abs().max()
        if deviation > GRADIENTS * largest:
            different.append(f"step 1: gradient of {name} deviates by {deviation / largest:.1e} of its largest")
    return different


@pytest.mark.parametrize("layout", ["colocated", "disaggregated"])
def test_every_layout_computes_the_same_numbers(outcomes: dict[str, Outcome], layout: str) -> None:
    assert compare(outcomes["single"], outcomes[layout]) == []


def test_the_comparison_covers_rewards_gradients_and_turns(outcomes: dict[str, Outcome]) -> None:
    """Rewards differ, every parameter has a gradient, the policy has left the reference, answers take two turns."""
    result = outcomes["single"]
    for batch in result.batches.values():
        assert batch.num_sequences == 32 and 0 < batch.rewards.mean() < 1
        assert {-1, 0, 1} <= set(batch.turn_ids.tolist())
        assert batch.old_logprobs[batch.loss_mask].abs().min() > 0
    assert all(gradient.abs().max() > 1e-4 for gradient in result.gradients.values())
    assert not torch.allclose(result.batches[2].old_logprobs, result.batches[2].ref_logprobs, atol=100 * LOGPROBS)


def reference_logprobs(model: Path, batch: Batch) -> torch.Tensor:
    """Log-probs of the model's tokens by transformers, one sequence at a time; 0 elsewhere. float32 [T]."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model)
    parts = []
    with torch.no_grad():
        for ids in batch.token_ids.split(batch.cu_seqlens.diff().tolist()):
            logprobs = policy(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            parts.append(torch.cat([logprobs.new_zeros(1), logprobs]))
    return torch.cat(parts) * batch.loss_mask


def deviation(model: Path, batch: Batch) -> float:
    """Largest deviation of the stored reference log-probs from those of transformers, nats."""
    return float((reference_logprobs(model, batch) - batch.ref_logprobs).abs().max())


def test_log_probs_match_transformers(outcomes: dict[str, Outcome], digit_model: Path) -> None:
    for result in outcomes.values():
        first, second = result.batches[1], result.batches[2]
        assert deviation(digit_model, first) < LOGPROBS and deviation(digit_model, second) < LOGPROBS
        for values in (first.gen_logprobs, first.old_logprobs):  # before the first step, policy and reference are equal
            assert torch.allclose(values, first.ref_logprobs, rtol=0, atol=LOGPROBS)


def test_two_swapped_tokens_are_noticed(outcomes: dict[str, Outcome], digit_model: Path) -> None:
    batch = outcomes["disaggregated"].batches[1]
    ids = batch.token_ids.clone()
    at = int(batch.loss_mask.nonzero()[0]) - 2  # in the prompt: the ids of the answer are as before
    assert ids[at] != ids[at - 1]
    ids[[at - 1, at]] = ids[[at, at - 1]]
    batch.token_ids, stored = ids, batch.token_ids
    try:
        assert deviation(digit_model, batch) > 10 * LOGPROBS
    finally:
        batch.token_ids = stored


def test_one_perturbed_weight_is_noticed(
    outcomes: dict[str, Outcome], digit_model: Path, digit_data: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "model"
    shutil.copytree(digit_model, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] += 0.05
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert deviation(other, outcomes["single"].batches[1]) > 10 * LOGPROBS
    different = compare(outcomes["single"], run("single", tmp_path / "run", other, digit_data))
    assert {"step 1: old_logprobs", "step 1: ref_logprobs"} <= set(different)
    assert any("gradient of" in line for line in different) and any("gradient norms" in line for line in different)


def test_samples_depend_on_their_seeds(outcomes: dict[str, Outcome]) -> None:
    """Group members differ although they share everything but their sample ids."""
    batch = outcomes["single"].batches[1]
    answers = [tuple(ids.tolist()) for ids in batch.token_ids.split(batch.cu_seqlens.diff().tolist())]
    assert len(np.unique([hash(answer) for answer in answers])) > 8 * 2
