"""Adapters on DeepSpeed: as on FSDP2, with every ZeRO stage: published, saved, resumed and planned."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.config import TrainerConfig, parse
from hpcrl.engines.train.dcp import FACTS, Base
from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.weights import fingerprint
from hpcrl.launch.model_folder import inspect_model
from hpcrl.models.families import read_shape
from hpcrl.planner.trainer import checkpoint_bytes, trainer_parts
from hpcrl.rollout.batch import Batch
from hpcrl.spec.weight_layout import TensorShards
from tests.checkpoint.writing import write_files
from tests.contracts.test_train_engine import check_contract, check_weights
from tests.contracts.train.deepspeed import gradients
from tests.engines import test_lora
from tests.engines.test_lora import LENGTHS, LORA, check_generator, native, share, step
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, run_ranks, worst_difference

if TYPE_CHECKING:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

every_stage = pytest.mark.parametrize("stage", [1, 2, 3])
BIAS = "e_score_correction_bias"
OFFLOAD = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}


def engine(folder: Path, stage: int, seed: int = 0, **config: Any) -> ZeroEngine:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

    own = {key: config.pop(key) for key in DeepSpeedConfig.model_fields if key in config}
    trainer = TrainerConfig(**{"lr": 1e-2, "logits_chunk_tokens": 8, "lora": LORA} | config)
    section = DeepSpeedConfig(zero_stage=stage, **own)
    return ZeroEngine(trainer, folder, zero=section, dtype=torch.float32, total_steps=10, seed=seed)


def results(trainer: ZeroEngine, whole: Batch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs of policy and reference of this rank's rows, and the whole gradients by name. Collective."""
    batch, plan = share(trainer, whole)
    logprobs = [trainer.logprobs(batch, plan, 1.0), trainer.reference_logprobs(batch, plan, 1.0)]
    return logprobs, gradients(trainer, batch, plan, Weighted(), norms_of(whole))


def fsdp2_state(folder: Path, state: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A checkpoint of FSDP2 after a step, and its results."""
    trainer, whole = test_lora.engine(folder), make_batch(LENGTHS)
    step(trainer, whole)
    state.mkdir()
    write_files(state, trainer.snapshot())
    logprobs, found = test_lora.results(trainer, whole)
    return [logprobs, trainer.reference_logprobs(*share(trainer, whole), 1.0)], found


@every_stage
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_gradients_match_fsdp2(family: str, stage: int, tmp_path: Path, world_of_one: None) -> None:
    """Also tests which weights the adapters belong to, so either engine can continue the other's run."""
    from hpcrl.engines.train.deepspeed import zero

    folder, whole = make_model_folder(family, tmp_path / "model"), make_batch(LENGTHS)
    want, theirs = fsdp2_state(folder, tmp_path / "state")
    trainer = engine(folder, stage)
    assert trainer.load(tmp_path / "state") == []
    for packing in ("auto", "off"):
        other = engine(folder, stage, seed=1, packing=packing)
        other.load(tmp_path / "state")
        got, mine = results(other, whole)
        assert all((a - b).abs().max() < 2e-5 for a, b in zip(got, want, strict=True))
        assert (got[0] - got[1]).abs().max() > 1e-2
        assert worst_difference(mine, theirs) < 1e-5 and mine.keys() == theirs.keys()
    frozen = {
        name: zero.full_tensor(p, torch.float32)
        for name, p in trainer.weights._hf.named_parameters()
        if "lora" not in name
    }
    step(trainer, whole)
    assert all(torch.equal(zero.full_tensor(trainer.weights[name], torch.float32), frozen[name]) for name in frozen)
    assert worst_difference(results(trainer, whole)[1], theirs) > 1e-3, "the comparison can fail"


@pytest.mark.parametrize("stage", [2, 3])
def test_the_training_contract_holds_with_adapters(stage: int, tmp_path: Path, world_of_one: None) -> None:
    folder = make_model_folder("qwen2", tmp_path / "model")
    check_contract(lambda path: engine(path, stage, lr=0.02), folder, tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_generator_has_the_log_probs_of_the_trainer(stage: int, tmp_path: Path, world_of_one: None) -> None:
    folder = make_model_folder("qwen2", tmp_path / "model")
    trainer, generator = engine(folder, stage), native(folder)
    check_generator(trainer, generator, lambda version: generator.load_weights(trainer.named_weights(), version))


def test_an_exported_model_has_merged_adapters(tmp_path: Path, world_of_one: None) -> None:
    folder, whole = make_model_folder("qwen2", tmp_path / "model"), make_batch(LENGTHS)
    fsdp2_state(folder, tmp_path / "state")
    folders = []
    for trainer in (test_lora.engine(folder), engine(folder, 3)):
        trainer.load(tmp_path / "state")
        folders.append(tmp_path / trainer.name)
        trainer.export_hf(folders[-1])
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        theirs, mine = (load_file(path / name) for path in folders)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert not torch.equal(mine[next(iter(mine))], torch.zeros(()))
    plan = [list(range(len(LENGTHS)))]
    merged = test_lora.engine(folders[1], lora={"rank": 0}).logprobs(whole, plan, 1.0)
    assert (merged - trainer.logprobs(whole, plan, 1.0)).abs().max() < 2e-5


@every_stage
def test_adapters_stay_in_float32_in_a_bfloat16_model(stage: int, tmp_path: Path, world_of_one: None) -> None:
    folder, whole = make_model_folder("qwen3", tmp_path / "model"), make_batch(LENGTHS)
    fsdp2_state(folder, tmp_path / "state")
    trainer = engine(folder, stage, param_dtype="bfloat16")
    first = dict(trainer.named_weights())
    origin = dict(test_lora.engine(folder).named_weights())
    assert all(torch.equal(tensor, origin[name]) for name, tensor in first.items())
    step(trainer, whole)
    assert {tensor.dtype for _, tensor in trainer.named_weights()} == {torch.float32}
    assert any((tensor - first[name]).any() for name, tensor in trainer.named_weights())
    with pytest.raises(ValueError, match=r"has adapters of .* and this run trains"):  # of rounded weights
        trainer.load(tmp_path / "state")


def earlier_fingerprint(folder: Path, changed: Callable[[str, Tensor], Tensor]) -> str:
    """The hash of all weights and buffers in float32 after a change."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {name: changed(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert any(name.endswith(BIAS) for name in tensors)
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    layout = [TensorShards.unsharded(name, kinds[name], tensor.shape, [0]) for name, tensor in tensors.items()]
    return fingerprint(layout, tensors.values())


def check_earlier(make: Callable[[int], Any], scratch: Path, fingerprints: tuple[str, str]) -> None:
    """The engine of a seed resumes from a checkpoint with the first fingerprint, but not the second. Collective."""
    trainer = make(0)
    assert trainer._base.fingerprint not in fingerprints
    step(trainer, make_batch(LENGTHS))
    for saved in fingerprints:
        (scratch / saved).mkdir(exist_ok=True, parents=True)
        files = trainer.snapshot()
        if FACTS in files:
            facts = json.loads(files[FACTS])
            facts["base"]["fingerprint"] = saved
            files |= {FACTS: json.dumps(facts).encode()}
        write_files(scratch / saved, files)
    dist.barrier()
    other = make(1)
    with pytest.raises(ValueError, match=rf"weights {fingerprints[1]}, and .* weights {trainer._base.fingerprint}$"):
        other.load(scratch / fingerprints[1])
    assert other.load(scratch / fingerprints[0]) == [] and other.optimizer_step == 1
    wanted = dict(trainer.named_weights())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in other.named_weights())


@pytest.mark.parametrize("stage", [1, 3])
def test_engines_agree_on_frozen_weights_in_bfloat16(stage: int, tmp_path: Path, world_of_one: None) -> None:
    """With buffers in float32, which the fingerprint of earlier versions converted: their checkpoints resume."""
    from tests.engines import test_megatron_lora

    low = {"param_dtype": "bfloat16"}
    folder = make_model_folder("glm4_moe", tmp_path / "model", moe_intermediate_size=16)
    others = [test_lora.engine(folder, dtype=dtype, **low) for dtype in (torch.float32, torch.bfloat16)]
    bases = [other._base for other in (*others, test_megatron_lora.engine(folder, **low))]
    assert bases == [engine(folder, stage, **low)._base] * 3
    earlier = earlier_fingerprint(folder, lambda name, tensor: tensor.bfloat16())
    check_earlier(lambda seed: engine(folder, stage, seed, **low), tmp_path, (earlier, "0" * 16))


def _fsdp2_on_two_ranks(folder: Path, scratch: Path, wanted: Base, earlier: str) -> None:
    for number, own in enumerate(({}, {"context_parallel": 2})):
        assert test_lora.engine(folder, **own)._base == wanted
        check_earlier(functools.partial(_seeded, folder, own), scratch / str(number), (earlier, "0" * 16))


def _seeded(folder: Path, own: dict[str, Any], seed: int) -> FSDP2Engine:
    return test_lora.engine(folder, seed=seed, **own)


def test_fsdp2_on_two_ranks_agrees_with_one(tmp_path: Path, world_of_one: None) -> None:
    """In earlier versions, each rank took its copy of a buffer for its rows: their checkpoints resume."""

    def misplaced(name: str, tensor: Tensor) -> Tensor:
        return torch.cat([tensor[: len(tensor) // 2]] * 2) if name.endswith(BIAS) else tensor

    folder = make_model_folder("glm4_moe", tmp_path / "model")
    base = test_lora.engine(folder)._base
    run_ranks(2, _fsdp2_on_two_ranks, folder, tmp_path, base, earlier_fingerprint(folder, misplaced))


@every_stage
def test_the_plan_counts_frozen_weights_separately(stage: int, tmp_path: Path, world_of_one: None) -> None:
    from hpcrl.engines.train.deepspeed import zero

    folder = make_model_folder("qwen2", tmp_path / "model")
    trainer = engine(folder, stage, param_dtype="bfloat16")
    section = {"engine": "deepspeed", "param_dtype": "bfloat16", "lora": LORA.model_dump()}
    config = parse({"trainer": section | {"deepspeed": {"zero_stage": stage}}})
    shape = read_shape(inspect_model(folder).config)
    planned = {part.name: part.num_bytes for part in reversed(trainer_parts(config, shape, 1))}
    assert trainer.optimizer is not None
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert planned["optimizer"] == sum(value.nbytes for value in states)
    assert planned["fp32 weights"] == sum(flat.nbytes for flat in zero.flat_weights(trainer.model.optimizer))
    assert planned["weights"] == 2 * trainer.num_parameters > 10 * planned["fp32 weights"] / 4
    assert checkpoint_bytes(config, shape) == 12 * trainer.num_trained + 4 * len(trainer.weights.names)


def _on_two_ranks(folder: Path, scratch: Path) -> dict[str, tuple[list[int], list[Tensor], dict[str, Tensor]]]:
    """Results of each stage from FSDP2's checkpoint; from its own checkpoint it continues with the same bits."""
    whole, found = make_batch(LENGTHS), {}
    for name, stage, settings in (("1", 1, {}), ("2", 2, {}), ("3", 3, {}), ("offload", 3, OFFLOAD)):
        trainer = engine(folder, stage, **settings)
        assert len(trainer.load(scratch / "state")) == 1  # of one rank
        batch, _ = share(trainer, whole)
        found[name] = batch.sample_ids.tolist(), *results(trainer, whole)
        step(trainer, whole)
        (scratch / name).mkdir(exist_ok=True)
        dist.barrier()
        write_files(scratch / name, trainer.snapshot())
        dist.barrier()
        other = engine(folder, stage, seed=1, **settings)
        assert other.load(scratch / name) == [] and other.optimizer_step == 2
        for each in (trainer, other):
            step(each, whole)
        theirs = dict(other.named_weights())
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in trainer.named_weights())
    return found


@pytest.mark.timeout(600)
def test_two_ranks_match_fsdp2_on_one(tmp_path: Path, world_of_one: None) -> None:
    folder, whole = make_model_folder("qwen3", tmp_path / "model"), make_batch(LENGTHS)
    want, theirs = fsdp2_state(folder, tmp_path / "state")
    for found in run_ranks(2, _on_two_ranks, folder, tmp_path):
        for ids, logprobs, mine in found.values():
            for got, all_rows in zip(logprobs, want, strict=True):
                rows = dict(zip(whole.sample_ids.tolist(), all_rows.split(whole.lengths.tolist()), strict=True))
                assert (got - torch.cat([rows[i] for i in ids])).abs().max() < 2e-5
            assert worst_difference(mine, theirs) < 1e-5
    for stage in (1, 3):
        other = engine(folder, stage)
        assert "was written by 2 trainer ranks" in other.load(tmp_path / "3")[0] and other.optimizer_step == 2


EXPERTS = LORA.model_copy(update={"parts": ["decoder", "experts"]})


def _experts_on_ranks(folder: Path) -> dict[str, dict[str, Tensor]]:
    whole, found = make_batch(LENGTHS), {}
    trainers: dict[str, Any] = {
        f"ZeRO-{stage}": lambda stage=stage: engine(folder, stage, **STABLE) for stage in (1, 3)
    }
    trainers["FSDP2"] = lambda: test_lora.engine(folder, **STABLE, activation_checkpointing=True)
    fsdp2.SMALL_MODEL_BYTES = 0
    for name, make in trainers.items():
        trainer = make()
        for _ in range(2):
            step(trainer, whole)
        check_weights(trainer)
        found[name] = named(trainer)
    return found


def named(trainer: FSDP2Engine) -> dict[str, Tensor]:
    """Adapters and the weights in which they are merged. Collective."""
    both = (*trainer._gathered(trainer.weights.names, {}), *trainer.named_weights())
    return {name: tensor.clone() for name, tensor in both}


STABLE = {"lora": EXPERTS, "eps": 1e-4}
"""With this eps, rounding of a gradient near zero does not become a step of full size."""


def test_adapters_of_experts_take_the_steps_of_one_rank(tmp_path: Path, world_of_one: None) -> None:
    folder, whole = make_model_folder("qwen3_moe", tmp_path / "model"), make_batch(LENGTHS)
    trainer = test_lora.engine(folder, **STABLE)
    for _ in range(2):
        step(trainer, whole)
    want = named(trainer)
    assert sum("experts.lora.gate_up_proj.lora_B" in name for name in want) == 2
    assert sum(name.endswith("experts.gate_up_proj") for name in want) == 2
    for results_of_rank in run_ranks(2, _experts_on_ranks, folder):
        for name, found in results_of_rank.items():
            assert found.keys() == want.keys(), name
            assert max(float((found[key] - want[key]).abs().max()) for key in want) < 5e-6, name
