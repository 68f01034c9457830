"""At a branch an engine loads a checkpoint with other rates: the next step has the new learning rate, betas and weight
decay, and the checkpoint's moments. The expected weights are AdamW's, worked out here from the gradients."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.training_engine import TrainEngine
from tests.checkpoint.writing import write_files
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, process_group

pytestmark = [pytest.mark.numerics, pytest.mark.slow, pytest.mark.timeout(200)]

BEFORE: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.999), "weight_decay": 0.0, "max_grad_norm": 1e6}
AFTER: dict[str, Any] = {"lr": 0.003, "betas": (0.8, 0.99), "weight_decay": 0.1, "max_grad_norm": 1e6}
EPS = 1e-8


def make(name: str, folder: Path, rates: dict[str, Any]) -> TrainEngine:
    config = TrainerConfig(engine=name, eps=EPS, **rates)
    if name == "megatron":
        from hpcrl.engines.train.megatron.engine import MegatronEngine

        return MegatronEngine(config, folder, total_steps=8)
    if name == "deepspeed":
        from hpcrl.engines.train.deepspeed.engine import ZeroEngine

        return ZeroEngine(config, folder, dtype=torch.float32, total_steps=8)
    from hpcrl.engines.train.fsdp2.engine import FSDP2Engine

    return FSDP2Engine(config, folder, dtype=torch.float32, total_steps=8)


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.named_weights()}


@pytest.mark.parametrize("name", ["fsdp2", "deepspeed", "megatron"])
def test_the_step_after_a_load_has_the_new_rates(name: str, tmp_path: Path) -> None:
    if name != "fsdp2":
        pytest.importorskip({"deepspeed": "deepspeed", "megatron": "megatron.core"}[name])
    gradients = importlib.import_module(f"tests.contracts.train.{name}").gradients
    model, folder = tmp_path / "model", tmp_path / "state"
    make_model_folder("qwen2", model)
    folder.mkdir()
    batch = make_batch((9, 12, 5))
    given = batch, [[0, 1], [2]], Weighted(), norms_of(batch)
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make(name, model, BEFORE)
        first = gradients(engine, *given)
        engine.train_step(*given)
        write_files(folder, engine.snapshot())
        saved, second = weights(engine), gradients(engine, *given)
        branch = make(name, model, AFTER)
        assert branch.load(folder) == []
        assert all(torch.equal(saved[key], tensor) for key, tensor in weights(branch).items())
        stats = branch.train_step(*given)
        assert stats["actor/lr"].total == AFTER["lr"] and branch.optimizer_step == 2
        new, old = (expected(saved, first, second, rates) for rates in (AFTER, BEFORE))
        found = weights(branch)
        assert set(new) == set(found)
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, new[key], rtol=2e-5, atol=2e-6, msg=lambda text, at=key: f"{at}: {text}")
        apart = max(float((found[key] - old[key]).abs().max()) for key in found)
        assert apart > 1e-3, "negative control: the old rates give other weights"


def expected(
    saved: dict[str, Tensor], first: dict[str, Tensor], second: dict[str, Tensor], rates: dict[str, Any]
) -> dict[str, Tensor]:
    """AdamW's second step with these rates, after a first step with BEFORE."""
    (old_1, old_2), (beta_1, beta_2), found = BEFORE["betas"], rates["betas"], {}
    for name, weight in saved.items():
        mean = beta_1 * (1 - old_1) * first[name] + (1 - beta_1) * second[name]
        square = beta_2 * (1 - old_2) * first[name] ** 2 + (1 - beta_2) * second[name] ** 2
        mean, square = mean / (1 - beta_1**2), square / (1 - beta_2**2)
        decay = rates["weight_decay"] if weight.dim() >= 2 else 0.0
        found[name] = weight * (1 - rates["lr"] * decay) - rates["lr"] * mean / (square.sqrt() + EPS)
    return found
