"""Muon: iterations and steps against formulas and torch's own, sharded like on one rank, and continued bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.config import ConfigError, TrainerConfig, parse
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.muon import COEFFICIENTS, STEPS, orthogonalized
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.launch.model_folder import inspect_model
from hpcrl.models.families import read_shape
from hpcrl.planner.trainer import checkpoint_bytes, trainer_parts
from tests.checkpoint.writing import write_files
from tests.engines.test_critic import Squares, critic_folder, make_critic
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, process_group, run_ranks

pytestmark = pytest.mark.numerics

LENGTHS = (9, 12, 5, 14)


def make(folder: Path, optimizer: str = "muon", own: dict[str, Any] | None = None, **trainer: Any) -> FSDP2Engine:
    settings = {"lr": 1e-2, "max_grad_norm": 100.0, "logits_chunk_tokens": 8, "weight_decay": 0.1} | trainer
    config = TrainerConfig(optimizer=optimizer, **settings)
    return FSDP2Engine(config, folder, own=FSDP2Config(**(own or {})), dtype=torch.float32, total_steps=8)


def train(engine: FSDP2Engine, steps: int = 1) -> dict[str, Tensor]:
    """The weights after these steps."""
    whole = make_batch(LENGTHS)
    rows = list(range(engine.data_parallel_rank, len(LENGTHS), engine.data_parallel_size))
    batch = whole.select(rows)
    for _ in range(steps):
        engine.train_step(batch, [list(range(len(rows)))], Weighted(0.7), norms_of(whole))
    return dict(engine.named_weights())


@pytest.mark.parametrize("shape", [(6, 17), (17, 6), (8, 8), (3, 5, 9)])
def test_singular_values_follow_the_newton_schulz_polynomial(shape: tuple[int, ...]) -> None:
    """Singular vectors stay, for one matrix and for each of a stack."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    first, third, fifth = COEFFICIENTS
    for _ in range(STEPS):
        values = first * values + third * values**3 + fifth * values**5
    torch.testing.assert_close(orthogonalized(matrices), left * values[..., None, :] @ right, rtol=0, atol=1e-10)
    assert not orthogonalized(torch.zeros(shape)).any()


def test_steps_match_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other weights get AdamW's step, bit for bit."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor)  # to which torch rounds its iterations
    folder = make_model_folder("qwen2", tmp_path / "model", tie_word_embeddings=False)
    settings = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    with process_group(0, 1, str(tmp_path / "world")):
        matrices = check_steps(folder, "muon", lambda weights: torch.optim.Muon(weights, **settings), 1e-3)
    assert len(matrices) == 14


def check_steps(
    folder: Path, optimizer: str, make_reference: Callable[[Iterable[Tensor]], Any], tolerance: float
) -> dict[str, Tensor]:
    """Compare three steps of the layers' matrices with another optimizer's, within a part of the movement, and the
    other weights with AdamW's; returns the matrices before the steps."""
    engine, adamw = make(folder, optimizer), make(folder, "adamw")
    before = {n: t for n, t in dict(engine.named_weights()).items() if "layers" in n and t.ndim >= 2}
    reference = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in before.items()}
    other, batch = make_reference(reference.values()), make_batch(LENGTHS)
    for step in range(3):
        engine.accumulate(batch, [[0, 1, 2, 3]], Weighted(0.7), norms_of(batch))
        for name, parameter in reference.items():
            parameter.grad = engine.weights[name].grad.clone()  # type: ignore[union-attr]
        engine._update()
        other.step()
        weights = dict(engine.named_weights())
        for name, parameter in reference.items():
            moved = (parameter.detach() - before[name]).abs().max()
            assert (weights[name] - parameter.detach()).abs().max() < tolerance * moved, (step, name)
            assert moved > 1e-3
        if step == 0:
            after = train(adamw)
            assert len(weights) > len(before)
            assert all(torch.equal(weights[name], after[name]) == (name not in before) for name in weights)
    return before


def test_a_critics_head_is_trained_by_adamw(tmp_path: Path) -> None:
    """So are its embedding, norms and biases: after a step they equal those of a critic with AdamW."""
    folder, batch = critic_folder("qwen2", tmp_path), make_batch(LENGTHS)
    with process_group(0, 1, str(tmp_path / "world")):
        weights = []
        for optimizer in ("muon", "adamw"):
            critic = make_critic(folder, optimizer=optimizer)
            critic.train_step(batch, [[0, 1, 2, 3]], Squares(), norms_of(batch))
            weights.append(dict(critic.named_weights()))
    same = {name for name, tensor in weights[0].items() if torch.equal(tensor, weights[1][name])}
    assert same == {name for name in weights[0] if "_proj.weight" not in name}
    assert {"score.weight", "score.bias", "model.embed_tokens.weight"} <= same


def _train_and_save(folder: Path, splits: dict[Path, dict[str, Any]]) -> list[dict[str, Tensor]]:
    """The weights of each split after three steps; those of an engine that continues after the first are the same."""
    results = []
    for scratch, own in splits.items():
        engine = make(folder, own=own)
        train(engine)
        write_files(scratch, engine.snapshot())
        dist.barrier()
        found = train(engine, 2)
        other = make(folder, own=own)
        assert other.load(scratch) == []
        again = train(other, 2)
        assert all(torch.equal(found[name], again[name]) for name in found)
        results.append(found)
    return results


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_divide_matrices_and_their_momentum(tmp_path: Path) -> None:
    """Two ranks, with uneven shards and experts, and copies of the model."""
    folder = make_model_folder("qwen3_moe", tmp_path / "model", hidden_size=36, num_experts=3, num_experts_per_tok=2)
    one, *of_two = (tmp_path / name for name in ("one", "two", "copies"))
    for path in (one, *of_two):
        path.mkdir()
    with process_group(0, 1, str(tmp_path / "world")):
        (wanted,) = _train_and_save(folder, {one: {}})
        before = dict(make(folder).named_weights())
        for of_rank in run_ranks(2, _train_and_save, folder, dict(zip(of_two, ({}, {"replicas": 2}), strict=True))):
            for split, found in enumerate(of_rank):
                for name, tensor in wanted.items():
                    moved = (tensor - before[name]).abs().max()
                    assert (found[name] - tensor).abs().max() < 1e-3 * moved, (split, name)
        continued = make(folder)
        assert "was written by 2 trainer ranks" in continued.load(of_two[0])[0]
        experts = "model.layers.0.mlp.experts.gate_up_proj"
        moved = (wanted[experts] - before[experts]).abs().max()
        assert (train(continued, 2)[experts] - wanted[experts]).abs().max() < 1e-3 * moved


def test_the_plan_counts_one_moment_per_matrix(tmp_path: Path) -> None:
    folder = make_model_folder("qwen3_moe", tmp_path / "model")
    config, shape = parse({"trainer": {"optimizer": "muon"}}), read_shape(inspect_model(folder).config)
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make(folder)
        train(engine)
        assert engine.optimizer is not None
        held = sum(t.nbytes for state in engine.optimizer.state.values() for t in state.values())
        weights = sum(parameter.nbytes for parameter in engine.shards)
    planned = {part.name: part.num_bytes for part in trainer_parts(config, shape, 1) if part.name != "gradients"}
    assert planned["optimizer"] == held
    assert checkpoint_bytes(config, shape) == weights + held
    assert planned["update of a matrix"] > 4 * 4 * 48 * 32


@pytest.mark.parametrize(
    ("trainer", "wrong"),
    [
        ({"engine": "megatron"}, "the megatron trainer has no muon; use adamw, or trainer.engine=fsdp2"),
        ({"engine": "deepspeed"}, "the deepspeed trainer has no muon; use adamw, or trainer.engine=fsdp2"),
        ({"fsdp2": {"tensor_parallel": 2}}, "without trainer.fsdp2.tensor_parallel; use adamw"),
        ({"fsdp2": {"cpu_offload": True}}, "without trainer.fsdp2.cpu_offload; use adamw"),
        ({"lora": {"rank": 4}}, "muon trains the matrices of layers, and trainer.lora freezes them; use adamw"),
    ],
)
def test_unsupported_settings_are_refused(trainer: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({"trainer": {"optimizer": "muon", **trainer}})
    assert any(wrong in line for line in refused.value.problems), refused.value.problems
