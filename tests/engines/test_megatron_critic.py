"""The critic of Megatron-Core on every kind of split against transformers' model for token classification and FSDP2's
critic; its checkpoints and exports."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from hpcrl.config import TrainerConfig, parse
from hpcrl.convert.__main__ import main as convert
from hpcrl.engines.train.fsdp2.critic import FSDP2Critic
from hpcrl.engines.train.megatron.spec import MegatronConfig, divide
from hpcrl.engines.train.training_engine import ValueEngine, check_objective
from hpcrl.rollout.batch import Batch, Norms
from tests.checkpoint.writing import write_files
from tests.contracts.train import megatron
from tests.engines.test_critic import LENGTHS, Squares, critic_folder, of_transformers
from tests.engines.worlds import make_batch, make_model_folder, norms_of, process_group, run_ranks, worst_difference

if TYPE_CHECKING:
    from hpcrl.engines.train.megatron.critic import MegatronCritic

pytestmark = pytest.mark.numerics

Split = tuple[str, dict[str, Any]]
ON_ONE: list[Split] = [("qwen2", {}), ("qwen3_moe", {"recompute": "full"}), ("deepseek_v3", {})]
ON_TWO: list[Split] = [
    ("qwen2", {}),
    ("qwen2", {"tensor_parallel": 2}),
    ("qwen2", {"tensor_parallel": 2, "sequence_parallel": True}),
    ("qwen2", {"pipeline_parallel": 2}),
    ("qwen2", {"context_parallel": 2, "distributed_optimizer": False}),
    ("qwen3_moe", {"expert_parallel": 2, "overlap_gradients": True, "overlap_parameters": True}),
]


def make(folder: Path, own: dict[str, Any], **config: Any) -> MegatronCritic:
    from hpcrl.engines.train.megatron.critic import MegatronCritic

    trainer = TrainerConfig(
        engine="megatron", lr=0.02, max_grad_norm=100.0, lr_schedule="linear", lr_warmup_steps=2, **config
    )
    return MegatronCritic(trainer, folder, own=MegatronConfig(**own), total_steps=8)


def gradients(engine: MegatronCritic, batch: Batch, plan: list[list[int]], norms: Norms) -> dict[str, Tensor]:
    """Over all pipeline stages. Collective."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, megatron.gradients(engine, batch, plan, Squares(), norms))
    return {name: gradient for share in shares for name, gradient in share.items()}


def weights(engine: MegatronCritic) -> dict[str, Tensor]:
    """Over all pipeline stages. Collective."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, dict(engine.named_weights()))
    return {name: tensor for share in shares for name, tensor in share.items()}


def check(splits: list[Split], folders: dict[str, Path], scratch: Path) -> None:
    """Values, gradients, their norm, a step and a resume of each split; every rank runs it."""
    whole, states = make_batch(LENGTHS), {}
    for number, (family, own) in enumerate(splits):
        values, expected = of_transformers(folders[family], whole)
        division = divide(parse({"trainer": {"engine": "megatron", "megatron": own}}), dist.get_world_size())
        group = next(i for i, ranks in enumerate(division.groups) if dist.get_rank() in ranks)
        rows = list(range(group, len(LENGTHS), len(division.groups)))
        batch, plan = whole.select(rows), [[0, 1], list(range(2, len(rows))), []]
        engine = make(folders[family], own)
        found = engine.values(batch, plan)
        holds = dist.get_rank() in division.outputs
        assert not holds or found is not None
        if found is not None:
            pieces = values.split(whole.lengths.tolist())
            torch.testing.assert_close(found, torch.cat([pieces[row] for row in rows]), rtol=0, atol=2e-5)
        got = gradients(engine, batch, plan, norms_of(whole))
        assert worst_difference(got, expected) < 1e-5, own
        other = gradients(engine, batch, plan, Norms(norms_of(whole).tokens * 1.001, 1.0))
        assert worst_difference(other, expected) > 1e-4, "the comparison notices"

        stats = engine.train_step(batch, plan, Squares(), norms_of(whole))
        if dist.get_rank() == division.outputs[0]:
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values()))
            assert stats["actor/grad_norm"].total == pytest.approx(norm, rel=1e-5), own
        assert not holds or stats["critic/vpred"].count == int(batch.loss_mask.sum())
        folder = scratch / f"state{dist.get_world_size()}.{number}"
        folder.mkdir(exist_ok=True)
        write_files(folder, engine.snapshot())
        dist.barrier()
        saved = weights(engine)
        engine.train_step(batch, plan, Squares(), norms_of(whole))
        resumed = make(folders[family], own)
        assert resumed.load(folder) == [] and resumed.optimizer_step == 1
        resumed.train_step(batch, plan, Squares(), norms_of(whole))
        continued = weights(resumed)
        assert all(torch.equal(tensor, continued[name]) for name, tensor in weights(engine).items()), own
        if family in states:  # written by another split
            resumed.load(states[family][0])
            loaded = weights(resumed)
            assert all(torch.equal(tensor, loaded[name]) for name, tensor in states[family][1].items()), own
        states[family] = folder, saved


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_values_and_gradients_match_transformers_on_every_split(tmp_path: Path) -> None:
    folders = {family: critic_folder(family, tmp_path / family) for family in ("qwen2", "qwen3_moe", "deepseek_v3")}
    with process_group(0, 1, str(tmp_path / "world")):
        check(ON_ONE, folders, tmp_path)
    run_ranks(2, check, ON_TWO, folders, tmp_path)


@pytest.mark.slow
def test_the_critic_matches_fsdp2s_and_its_export_loads_in_transformers(tmp_path: Path) -> None:
    """From a model without a value head, which begins with zeros; training can also start from an exported critic."""
    folder, batch, plan = make_model_folder("qwen2", tmp_path / "base"), make_batch(LENGTHS), [list(range(6))]
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make(folder, {})
        assert isinstance(engine, ValueEngine)
        check_objective(engine, Squares())
        with pytest.raises(ValueError, match="needs entropy of every token"):
            check_objective(engine, type("Asks", (Squares,), {"outputs": frozenset({"entropy"})})())
        assert (found := engine.values(batch, plan)) is not None and not found.any()
        trainer = TrainerConfig(lr=0.02, max_grad_norm=100.0, lr_schedule="linear", lr_warmup_steps=2)
        other = FSDP2Critic(trainer, folder, dtype=torch.float32, total_steps=8)
        for _ in range(3):
            ours, theirs = (one.train_step(batch, plan, Squares(), norms_of(batch)) for one in (engine, other))
            assert ours["actor/grad_norm"].total == pytest.approx(theirs["actor/grad_norm"].total, rel=1e-4)
        assert engine.num_parameters == other.num_parameters
        values = engine.values(batch, plan)
        assert values is not None and values.abs().max() > 0.01
        torch.testing.assert_close(values, other.values(batch, plan), rtol=0, atol=1e-4)
        engine.export_hf(tmp_path / "hf")
        other.export_hf(tmp_path / "fsdp2")
        for name, critic in (("hf", engine), ("fsdp2", other)):
            (saved := tmp_path / f"{name} checkpoint").mkdir()
            write_files(saved, critic.snapshot())
            words = [
                "--checkpoint",
                str(saved),
                "--model",
                str(folder),
                "--output",
                str(tmp_path / f"{name} converted"),
            ]
            assert convert([*words, "--verify"]) == 0
            exported, converted = (load_file(tmp_path / f / "model.safetensors") for f in (name, f"{name} converted"))
            assert exported.keys() == converted.keys()
            assert all(torch.equal(tensor, converted[key]) for key, tensor in exported.items())
        again = make(tmp_path / "hf", {}).values(batch, plan)
        assert again is not None and torch.equal(again, values)
        exports = ("hf", "fsdp2", "hf converted", "fsdp2 converted")
        ours, *theirs = (AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in exports)
        assert all(ours | {"_name_or_path": ""} == one | {"_name_or_path": ""} for one in theirs)
        assert ours["architectures"] == ["Qwen2ForTokenClassification"]
        rounded = make(folder, {}, param_dtype="bfloat16")
        rounded.train_step(batch, plan, Squares(), norms_of(batch))
        assert {tensor.dtype for tensor in rounded.weights.parameters.values()} == {torch.bfloat16}
        assert (half := rounded.values(batch, plan)) is not None and half.dtype == torch.float32 and half.any()
    torch.testing.assert_close(of_transformers(tmp_path / "hf", batch)[0], values, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_family_without_a_class_for_critics_is_refused(world_of_one: None, tmp_path: Path) -> None:
    from hpcrl.engines.train.megatron.critic import MegatronCritic

    folder = make_model_folder("glm4_moe", tmp_path / "model")
    with pytest.raises(ValueError, match="no token classification model of glm4_moe, as which a critic is exported"):
        MegatronCritic(TrainerConfig(engine="megatron"), folder, total_steps=1)
