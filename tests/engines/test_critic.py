"""The critic of FSDP2 against transformers' model for token classification, and against itself on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForTokenClassification

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fsdp2.critic import FSDP2Critic
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.engines.train.training_engine import ValueEngine, check_objective
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch, Norms
from tests.checkpoint.writing import write_files
from tests.engines.worlds import make_batch, make_model_folder, norms_of, process_group, run_ranks, worst_difference

pytestmark = pytest.mark.numerics

LENGTHS = (9, 12, 5, 14, 6, 8)


class Squares(Objective):
    """Squared distance to a target of each token, so that a mix-up of tokens shows."""

    outputs = frozenset({"values"})

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        assert outputs.values is not None
        targets = torch.cos(batch.token_ids.float() + batch.position_ids)
        loss = (outputs.values - targets)[batch.loss_mask].square().sum() / norms.tokens
        return loss, {"critic/vpred": stat(outputs.values, batch.loss_mask)}


def critic_folder(family: str, folder: Path, **changes: Any) -> Path:
    """The decoder of make_model_folder() with a random head."""
    base = make_model_folder(family, folder / "base", **changes)
    model = AutoModelForTokenClassification.from_pretrained(base, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    torch.nn.init.constant_(model.score.bias, 0.4)
    model.save_pretrained(folder / "critic")
    return folder / "critic"


def make_critic(
    folder: Path, dtype: torch.dtype = torch.float32, own: dict[str, Any] | None = None, **config: Any
) -> FSDP2Critic:
    trainer = TrainerConfig(lr=0.02, max_grad_norm=100.0, lr_schedule="linear", lr_warmup_steps=2, **config)
    return FSDP2Critic(trainer, folder, own=FSDP2Config(**own or {}), dtype=dtype, total_steps=8)


def of_transformers(folder: Path, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Values [T] and gradients of Squares, one sequence at a time: the output before each token is its value."""
    model = AutoModelForTokenClassification.from_pretrained(folder, attn_implementation="eager").eval()
    values = []
    for tokens in batch.token_ids.split(batch.lengths.tolist()):
        logits = model(tokens[None]).logits[0, :, 0]
        values.append(torch.cat([logits.new_zeros(1), logits[:-1]]))
    found = torch.cat(values) * batch.loss_mask
    Squares().loss(Outputs(found, values=found), batch, norms_of(batch))[0].backward()
    return found.detach(), {name: p.grad for name, p in model.named_parameters()}


def gradients(engine: FSDP2Critic, batch: Batch, plan: list[list[int]], norms: Norms) -> dict[str, Tensor]:
    engine.accumulate(batch, plan, Squares(), norms)
    found = {}
    for name, p in engine.model.named_parameters():
        assert p.grad is not None, name
        full = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        found[name.removeprefix("hf.")] = engine.weights.from_parts(name.removeprefix("hf."), full.float().clone())
    engine.discard_gradients()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("packing", ["require", "off"])
def test_values_and_gradients_match_transformers(family: str, packing: str, tmp_path: Path) -> None:
    folder, batch = critic_folder(family, tmp_path), make_batch(LENGTHS)
    values, expected = of_transformers(folder, batch)
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make_critic(folder, own={"packing": packing})
        assert isinstance(engine, ValueEngine) and values[batch.loss_mask].std() > 0.1
        for plan in ([list(range(6))], [[4, 0], [], [1, 2, 3, 5]]):
            torch.testing.assert_close(engine.values(batch, plan), values, rtol=0, atol=2e-5)
            assert worst_difference(gradients(engine, batch, plan, norms_of(batch)), expected) < 1e-5
        assert not engine.values(batch, [[1]]).split(batch.lengths.tolist())[0].any()
        shifted = values.roll(1) * batch.loss_mask
        assert (engine.values(batch, [list(range(6))]) - shifted).abs().max() > 0.1, "the test can fail"


@pytest.mark.slow
def test_a_new_head_starts_at_zero_and_is_trained(tmp_path: Path) -> None:
    folder, batch = make_model_folder("qwen2", tmp_path / "base"), make_batch(LENGTHS)
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make_critic(folder)
        check_objective(engine, Squares())
        plan = [list(range(6))]
        assert not engine.values(batch, plan).any()
        losses = []
        for _ in range(8):
            engine.train_step(batch, plan, Squares(), norms_of(batch))
            loss, _ = Squares().loss(
                Outputs(values := engine.values(batch, plan), values=values), batch, norms_of(batch)
            )
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0] and engine.optimizer_step == 8


def _computes_in_float32(module: torch.nn.Module, inputs: tuple[Tensor]) -> None:
    assert module.weight.dtype == inputs[0].dtype == torch.float32


@pytest.mark.slow
def test_the_head_stays_in_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    folder, batch = critic_folder("qwen2", tmp_path), make_batch(LENGTHS)
    values, _ = of_transformers(folder, batch)
    with process_group(0, 1, str(tmp_path / "world")):
        for dtype in (torch.bfloat16, torch.float32):  # plain parameters, and gathered ones
            engine = make_critic(folder, dtype, param_dtype="bfloat16")
            assert engine.sharded == (dtype == torch.float32)
            weights = dict(engine.model.hf.named_parameters())
            assert weights["score.weight"].dtype == torch.float32 and weights["model.norm.weight"].dtype == dtype
            handle = engine.model.hf.score.register_forward_pre_hook(_computes_in_float32)
            found = engine.values(batch, [list(range(6))])
            handle.remove()
            assert 0 < (found - values).abs().max() < 0.2
            engine.train_step(batch, [list(range(6))], Squares(), norms_of(batch))


def test_an_exported_critic_loads_in_transformers_and_can_be_started_from(tmp_path: Path) -> None:
    batch, plan = make_batch(LENGTHS), [list(range(6))]
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make_critic(make_model_folder("qwen2", tmp_path / "base", tie_word_embeddings=False))
        for _ in range(3):
            engine.train_step(batch, plan, Squares(), norms_of(batch))
        engine.export_hf(tmp_path / "hf")
        values = engine.values(batch, plan)
        assert values.abs().max() > 0.01
        assert torch.equal(make_critic(tmp_path / "hf").values(batch, plan), values)
    assert AutoConfig.from_pretrained(tmp_path / "hf").architectures == ["Qwen2ForTokenClassification"]
    torch.testing.assert_close(of_transformers(tmp_path / "hf", batch)[0], values, rtol=0, atol=2e-5)


def test_a_family_without_token_classification_is_refused(tmp_path: Path) -> None:
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "tie_word_embeddings": True}
    make_model_folder("opt", tmp_path / "opt", **sizes)
    with (
        process_group(0, 1, str(tmp_path / "world")),
        pytest.raises(ValueError, match=r"opt: config\.json makes no critic"),
    ):
        make_critic(tmp_path / "opt")


def _on_ranks(folder: Path, scratch: Path, own: dict[str, int]) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """Values and gradients on these ranks; a checkpoint gives the same bits again."""
    rank, width = dist.get_rank(), own.get("tensor_parallel", 1) * own.get("context_parallel", 1)
    groups, mine = dist.get_world_size() // width, dist.get_rank() // width
    whole = make_batch(LENGTHS)
    rows = list(range(mine, len(LENGTHS), groups))
    batch, plan = whole.select(rows), [[0, 1], list(range(2, len(rows))), []]
    engine = make_critic(folder, own=own)
    values = engine.values(batch, plan)
    found = gradients(engine, batch, plan, norms_of(whole))
    engine.train_step(batch, plan, Squares(), norms_of(whole))
    (scratch / "state").mkdir(exist_ok=True)
    write_files(scratch / "state", engine.snapshot())
    dist.barrier()
    engine.train_step(batch, plan, Squares(), norms_of(whole))
    other = make_critic(folder, own=own)
    assert other.load(scratch / "state") == [] and other.optimizer_step == 1
    stats = other.train_step(batch, plan, Squares(), norms_of(whole))
    assert stats["critic/vpred"].count == int(batch.loss_mask.sum()) and ("actor/lr" in stats) == (rank == 0)
    assert torch.equal(other.values(batch, plan), engine.values(batch, plan))
    pieces = dict(zip(rows, values.split(batch.lengths.tolist()), strict=True))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    every = {row: piece for part in gathered for row, piece in part.items()}
    return torch.cat([every[row] for row in range(len(LENGTHS))]), found, [other.values(batch, plan)]


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"tensor_parallel": 2}, {"context_parallel": 2}], ids=str)
def test_two_ranks_match_the_values_and_gradients_of_one(own: dict[str, int], tmp_path: Path) -> None:
    folder, batch = critic_folder("qwen3", tmp_path, tie_word_embeddings=False), make_batch(LENGTHS)
    values, expected = of_transformers(folder, batch)
    for found, gradient, _ in run_ranks(2, _on_ranks, folder, tmp_path, own):
        torch.testing.assert_close(found, values, rtol=0, atol=2e-5)
        assert worst_difference(gradient, expected) < 1e-5
