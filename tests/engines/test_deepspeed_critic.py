"""The critic of DeepSpeed: values and gradients of transformers' model, and the state of FSDP2's critic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from hpcrl.config import TrainerConfig, parse
from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig
from hpcrl.engines.train.training_engine import ValueEngine, check_objective
from hpcrl.launch.model_folder import inspect_model
from hpcrl.models.families import read_shape
from hpcrl.planner.trainer import critic_parts
from hpcrl.rollout.batch import Batch, Norms
from tests.checkpoint.writing import write_files
from tests.contracts.train import deepspeed
from tests.engines.test_critic import LENGTHS, Squares, critic_folder, make_critic, of_transformers
from tests.engines.worlds import make_batch, make_model_folder, norms_of, run_ranks, worst_difference

if TYPE_CHECKING:
    from hpcrl.engines.train.deepspeed.critic import ZeroCritic
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

PLAN = [[4, 0], [], [1, 2, 3, 5]]
OFFLOAD = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
every_stage = pytest.mark.parametrize("stage", [1, 2, 3])


def make(folder: Path, stage: int, param_dtype: str = "float32", **own: Any) -> ZeroCritic:
    """An engine with the keys of make_critic()."""
    from hpcrl.engines.train.deepspeed.critic import ZeroCritic

    schedule = {"lr": 0.02, "lr_schedule": "linear", "lr_warmup_steps": 2}
    keys = schedule | {"max_grad_norm": 100.0, "param_dtype": param_dtype}
    section = DeepSpeedConfig(zero_stage=stage, **own)
    return ZeroCritic(TrainerConfig(**keys), folder, zero=section, dtype=torch.float32, total_steps=8)


def gradients(critic: ZeroEngine, batch: Batch, norms: Norms, plan: list[list[int]]) -> dict[str, Tensor]:
    return deepspeed.gradients(critic, batch, plan, Squares(), norms)


@every_stage
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_values_and_gradients_match_transformers(family: str, stage: int, tmp_path: Path, world_of_one: None) -> None:
    folder, batch = critic_folder(family, tmp_path), make_batch(LENGTHS)
    values, expected = of_transformers(folder, batch)
    for packing in ("require", "off"):
        critic = make(folder, stage, packing=packing)
        assert isinstance(critic, ValueEngine) and critic.computes == {"values"}
        check_objective(critic, Squares())
        for _ in range(2):
            torch.testing.assert_close(critic.values(batch, PLAN), values, rtol=0, atol=2e-5)
            assert worst_difference(gradients(critic, batch, norms_of(batch), PLAN), expected) < 1e-5
    shifted = values.roll(1) * batch.loss_mask
    assert (critic.values(batch, PLAN) - shifted).abs().max() > 0.1, "the test can fail"


@every_stage
def test_a_critic_resumes_from_fsdp2_and_exports_the_same(stage: int, tmp_path: Path, world_of_one: None) -> None:
    """From a new head, which is zero."""
    folder, batch = make_model_folder("qwen2", tmp_path / "base"), make_batch(LENGTHS)
    theirs, critic = make_critic(folder), make(folder, stage)
    assert not critic.values(batch, PLAN).any()
    for _ in range(2):
        theirs.train_step(batch, PLAN, Squares(), norms_of(batch))
    (tmp_path / "state").mkdir()
    write_files(tmp_path / "state", theirs.snapshot())
    assert critic.load(tmp_path / "state") == []
    values = theirs.values(batch, PLAN)
    assert values.abs().max() > 0.01
    torch.testing.assert_close(critic.values(batch, PLAN), values, rtol=0, atol=1e-6)
    for engine in (theirs, critic):
        engine.export_hf(tmp_path / engine.name)
    weights, mine = (load_file(tmp_path / engine.name / "model.safetensors") for engine in (theirs, critic))
    assert mine.keys() == weights.keys() and all(torch.equal(mine[name], weights[name]) for name in mine)
    for engine in (theirs, critic):
        engine.train_step(batch, PLAN, Squares(), norms_of(batch))
    torch.testing.assert_close(critic.values(batch, PLAN), theirs.values(batch, PLAN), rtol=0, atol=1e-4)
    assert (critic.values(batch, PLAN) - values).abs().max() > 0.01


@every_stage
def test_the_head_computes_in_float32_in_a_bfloat16_model(stage: int, tmp_path: Path, world_of_one: None) -> None:
    folder, batch = critic_folder("qwen2", tmp_path), make_batch(LENGTHS)
    values, _ = of_transformers(folder, batch)
    critic = make(folder, stage, "bfloat16")
    head = load_file(folder / "model.safetensors")["score.weight"]
    assert torch.equal(dict(critic.named_weights())["score.weight"], head)
    assert not torch.equal(head, head.bfloat16().float())
    assert 0 < (critic.values(batch, PLAN) - values).abs().max() < 0.2
    critic.train_step(batch, PLAN, Squares(), norms_of(batch))
    assert not torch.equal(dict(critic.named_weights())["score.weight"], head)


@every_stage
def test_the_plan_counts_the_critics_state(stage: int, tmp_path: Path, world_of_one: None) -> None:
    from hpcrl.engines.train.deepspeed import zero

    folder = make_model_folder("qwen2", tmp_path / "base")
    critic = make(folder, stage)
    words = {
        "trainer": {"engine": "deepspeed", "deepspeed": {"zero_stage": stage}},
        "algorithm": {"advantage_estimator": "gae"},
    }
    parts = critic_parts(parse(words), read_shape(inspect_model(folder).config), 1)
    planned = {part.name: part.num_bytes for part in reversed(parts)}
    assert critic.optimizer is not None
    states = [value for state in critic.optimizer.state.values() for value in state.values()]
    assert planned["optimizer"] == sum(value.nbytes for value in states)
    assert planned["fp32 weights"] == sum(flat.nbytes for flat in zero.flat_weights(critic.model.optimizer))


def _on_two_ranks(folder: Path, scratch: Path) -> dict[str, tuple[list[int], Tensor, dict[str, Tensor]]]:
    """Values and gradients of each stage; a checkpoint gives the same bits again."""
    whole, found = make_batch(LENGTHS), {}
    rows = list(range(dist.get_rank(), len(LENGTHS), 2))
    batch, plan = whole.select(rows), [[0], [1, 2], []]
    for name, stage, own in (("1", 1, {}), ("2", 2, {}), ("3", 3, {}), ("offload", 3, OFFLOAD)):
        critic = make(folder, stage, **own)
        found[name] = rows, critic.values(batch, plan), gradients(critic, batch, norms_of(whole), plan)
        critic.train_step(batch, plan, Squares(), norms_of(whole))
        (scratch / name).mkdir(exist_ok=True)
        dist.barrier()
        write_files(scratch / name, critic.snapshot())
        dist.barrier()
        other = make(folder, stage, **own)
        assert other.load(scratch / name) == [] and other.optimizer_step == 1
        for each in (critic, other):
            stats = each.train_step(batch, plan, Squares(), norms_of(whole))
            assert ("actor/lr" in stats) == (dist.get_rank() == 0)
        assert torch.equal(critic.values(batch, plan), other.values(batch, plan))
    return found


@pytest.mark.timeout(600)
def test_two_ranks_match_the_values_and_gradients_of_one(tmp_path: Path) -> None:
    folder, batch = critic_folder("qwen3", tmp_path, tie_word_embeddings=False), make_batch(LENGTHS)
    values, expected = of_transformers(folder, batch)
    pieces = values.split(batch.lengths.tolist())
    for found in run_ranks(2, _on_two_ranks, folder, tmp_path):
        for rows, got, mine in found.values():
            torch.testing.assert_close(got, torch.cat([pieces[row] for row in rows]), rtol=0, atol=2e-5)
            assert worst_difference(mine, expected) < 1e-5
