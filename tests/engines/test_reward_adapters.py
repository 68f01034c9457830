"""Reward models with adapters below the head: gradients of peft's recipe by hand, checkpoints, merged exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hpcrl.config import LoRAConfig, TrainerConfig
from hpcrl.engines.scalar import ScalarModel
from hpcrl.engines.train.fsdp2.critic import FSDP2Scorer
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.spec.lora import is_adapter
from tests.checkpoint.writing import write_files
from tests.engines.test_scalar import make_reward_model
from tests.engines.test_scorer import NORMS, OBJECTIVE, dialogues, of_transformers, pairs, scores_of
from tests.engines.worlds import process_group, run_ranks

pytestmark = pytest.mark.numerics

PLAN = [[2, 3], [0, 1, 4, 5]]


def make_adapted(folder: Path, engine: str = "fsdp2") -> Any:
    trainer = TrainerConfig(lr=0.003, max_grad_norm=100.0, engine=engine, lora=LoRAConfig(rank=4, alpha=8))
    given: dict[str, Any] = {"dtype": torch.float32, "total_steps": 8}
    if engine == "fsdp2":
        return FSDP2Scorer(trainer, folder, own=FSDP2Config(), **given)
    from hpcrl.engines.train.deepspeed.critic import ZeroScorer
    from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig

    return ZeroScorer(trainer, folder, zero=DeepSpeedConfig(zero_stage=2), **given)


def parameters(engine: Any) -> dict[str, Tensor]:
    module = engine.module if hasattr(engine, "module") else engine.model
    return {name.removeprefix("hf."): p for name, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_adapters_and_head_are_trained_saved_and_merged(engine: str, tmp_path: Path) -> None:
    folder, batch = make_reward_model(tmp_path / "model"), pairs()
    scores, gradients = of_transformers(folder)
    with process_group(0, 1, str(tmp_path / "world")):
        made = make_adapted(folder, engine)
        trained = [name for name, p in parameters(made).items() if p.requires_grad]
        assert [name for name in trained if not is_adapter(name)] == ["score.weight"] and len(trained) == 2 * 2 * 7 + 1
        assert not any(name.startswith("score.lora") for name in trained)
        assert scores_of(made, batch) == pytest.approx(scores, abs=1e-5), "the adapters' product is zero"
        if engine == "fsdp2":
            made.accumulate(batch, PLAN, OBJECTIVE, NORMS)
            found = {name: p.grad for name, p in parameters(made).items() if p.grad is not None}
            assert found.keys() == set(trained)
            torch.testing.assert_close(found["score.weight"], gradients["score.weight"], rtol=1e-4, atol=1e-6)
            name = "model.layers.1.mlp.down_proj"  # of y = W x + 2 B A x with B = 0: dB = 2 dW A^T, dA = 0
            first = parameters(made)[f"{name}.lora_A.weight"].detach()
            wanted = 2 * gradients[f"{name}.weight"] @ first.T
            torch.testing.assert_close(found[f"{name}.lora_B.weight"], wanted, rtol=1e-4, atol=1e-6)
            made.discard_gradients()
        losses = [made.train_step(batch, PLAN, OBJECTIVE, NORMS)["rm/loss"].total for _ in range(3)]
        assert losses[-1] < losses[0]
        changed = scores_of(made, batch)
        made.export_hf(tmp_path / "hf")
        (saved := tmp_path / "checkpoint").mkdir()
        write_files(saved, made.snapshot())
        made.train_step(batch, PLAN, OBJECTIVE, NORMS)
        after = scores_of(made, batch)
        other = make_adapted(folder, "deepspeed" if engine == "fsdp2" else "fsdp2")  # engines read each other's
        other.load(saved)
        assert scores_of(other, batch) == pytest.approx(changed, abs=1e-5)
        made.load(saved)
        assert made.optimizer_step == 3 and scores_of(made, batch) == pytest.approx(changed, abs=1e-6)
        made.train_step(batch, PLAN, OBJECTIVE, NORMS)
        assert scores_of(made, batch) == pytest.approx(after, abs=1e-6)
        with pytest.raises(ValueError, match=r"has adapters of .*, and this run trains whole models"):
            FSDP2Scorer(TrainerConfig(), folder, own=FSDP2Config(), dtype=torch.float32, total_steps=8).load(saved)
    assert not (tmp_path / "hf" / "adapter").exists()
    assert of_transformers(tmp_path / "hf")[0] == pytest.approx(changed, abs=2e-5)
    role = ScalarModel(tmp_path / "hf", dtype=torch.float32, device="cpu", max_batch_tokens=64)
    assert role.scores(dialogues()) == pytest.approx(changed, abs=2e-5)
    own, base = (
        AutoModelForSequenceClassification.from_pretrained(path).state_dict() for path in (tmp_path / "hf", folder)
    )
    same = {name for name in base if torch.equal(own[name], base[name])}
    assert "model.embed_tokens.weight" in same and not same & {"score.weight", "model.layers.0.mlp.up_proj.weight"}


def _on_ranks(folder: Path, scratch: Path) -> list[float]:
    """The scores after two steps, of which the second one follows a checkpoint; each rank has one or two pairs."""
    rows = [row for row in range(6) if (row // 2) % 2 == dist.get_rank()]
    batch, plan = pairs(rows), [list(range(len(rows))), []]
    engine = make_adapted(folder)
    engine.train_step(batch, plan, OBJECTIVE, NORMS)
    (scratch / "state").mkdir(exist_ok=True)
    write_files(scratch / "state", engine.snapshot())
    dist.barrier()
    again = make_adapted(folder)
    assert again.load(scratch / "state") == [] and again.optimizer_step == 1
    again.train_step(batch, plan, OBJECTIVE, NORMS)
    found: list[Any] = [None] * 2
    dist.all_gather_object(found, dict(zip(rows, scores_of(again, batch), strict=True)))
    again.export_hf(scratch / "hf")
    scores = {row: score for part in found for row, score in part.items()}
    return [scores[row] for row in range(6)]


@pytest.mark.slow
def test_two_ranks_match_one_through_a_checkpoint(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model")
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make_adapted(folder)
        for _ in range(2):
            engine.train_step(pairs(), PLAN, OBJECTIVE, NORMS)
        wanted = scores_of(engine, pairs())
    for found in run_ranks(2, _on_ranks, folder, tmp_path):
        assert found == pytest.approx(wanted, abs=1e-4)
    assert of_transformers(tmp_path / "hf")[0] == pytest.approx(wanted, abs=1e-4)
