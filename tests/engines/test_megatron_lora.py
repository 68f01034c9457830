"""Adapters on Megatron-Core: as on FSDP2 on one rank, equal on splits, saved, resumed, exported, and planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from hpcrl.config import LoRAConfig, TrainerConfig, parse
from hpcrl.engines.train.megatron.memory import stage_parts
from hpcrl.engines.train.megatron.spec import MegatronConfig
from hpcrl.rollout.batch import Batch
from tests.checkpoint.writing import write_files
from tests.contracts.test_train_engine import check_contract
from tests.engines import test_lora
from tests.engines.test_critic import Squares
from tests.engines.test_lora import LENGTHS, LORA, check_generator, native
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, run_ranks, worst_difference

if TYPE_CHECKING:
    from hpcrl.engines.train.megatron.engine import MegatronEngine

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

STABLE = {"eps": 1e-4}
"""With this eps, rounding of a gradient near zero does not become a step of full size."""


def engine(folder: Path, seed: int = 0, **config: Any) -> MegatronEngine:
    from hpcrl.engines.train.megatron.engine import MegatronEngine

    own = MegatronConfig(**{key: config.pop(key) for key in MegatronConfig.model_fields if key in config})
    settings = {"lr": 1e-2, "logits_chunk_tokens": 8, "lora": LORA} | STABLE | config
    return MegatronEngine(TrainerConfig(engine="megatron", **settings), folder, own=own, total_steps=10, seed=seed)


def share(trainer: MegatronEngine, whole: Batch) -> tuple[Batch, list[list[int]]]:
    batch = whole.select(list(range(trainer.data_parallel_rank, whole.num_sequences, trainer.data_parallel_size)))
    return batch, [[0], list(range(1, batch.num_sequences))]


def step(trainer: MegatronEngine, whole: Batch) -> None:
    trainer.train_step(*share(trainer, whole), Weighted(), norms_of(whole))


def gradients(trainer: MegatronEngine, whole: Batch) -> dict[str, Tensor]:
    """The whole gradients of all stages by name. Collective."""
    trainer.accumulate(*share(trainer, whole), Weighted(), norms_of(whole), everywhere=True)
    own = {name: weight.main_grad for name, weight in trainer.published.parameters.items()}
    return of_all_stages({name: tensor.clone() for name, tensor in trainer.published.full_tensors(own, {})})


def of_all_stages(own: dict[str, Tensor]) -> dict[str, Tensor]:
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, own)
    return {name: tensor for one in shares for name, tensor in one.items()}


def fsdp2(folder: Path, **config: Any) -> Any:
    return test_lora.engine(folder, **STABLE | config)


def far(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def check_plan(trainer: MegatronEngine, split: dict[str, Any], exact: bool = True) -> None:
    """The plan counts this rank's frozen and trained numbers. With fewer key heads than ranks, it counts whole B."""
    from megatron.core import parallel_state

    from hpcrl.engines.train.megatron.weights import state_of

    config = parse({"trainer": {"engine": "megatron", "lora": LORA.model_dump(), "megatron": split}})
    stage = parallel_state.get_pipeline_model_parallel_rank()
    parts = {
        part.name: part.num_bytes
        for part in stage_parts(config, trainer.description.shape, dist.get_world_size())[stage]
    }
    kept = [tensor for chunk in trainer.chunks for _, tensor in state_of(chunk.module)]
    learnt = [parameter for parameter in kept if parameter.requires_grad]
    held, own = (4 * sum(parameter.numel() for parameter in some) for some in (kept, learnt))
    assert 0 < own < held / 4
    more = parts["weights"] - held, parts["gradients"] - own
    assert more == (0, 0) if exact else all(0 <= each < own for each in more), (split, more)


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "qwen2_moe",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("deepseek_v3", "gpt_oss", "qwen3_next")),
    ],
)
def test_one_rank_trains_as_fsdp2(family: str, tmp_path: Path, world_of_one: None) -> None:
    folder, batch = make_model_folder(family, tmp_path / "model", **MODELS.get(family, {})), make_batch(LENGTHS)
    mine, theirs = engine(folder), fsdp2(folder)
    assert mine.lora is not None and mine.lora.base == theirs._base
    assert far(dict(mine.named_weights()), dict(theirs.named_weights())) == 0
    plan = [list(range(len(LENGTHS)))]
    for number in range(2):
        want_logprobs, want = test_lora.results(theirs, batch)
        theirs.discard_gradients()
        got = mine.logprobs(batch, plan, 1.0)
        assert got is not None and (got - want_logprobs).abs().max() < 2e-5
        found = gradients(mine, batch)
        if number == 0:  # the gradients of A are zero
            zeros = {name for name in want if not want[name].any()}
            assert zeros == {name for name in found if not found[name].any()} and len(zeros) == len(found) // 2
            found, want = ({name: one[name] for name in one if name not in zeros} for one in (found, want))
        assert worst_difference(found, want) < (5e-5 if number else 1e-5)  # the weights differ by up to 5e-6, too
        step(mine, batch)
        test_lora.step(theirs, batch)
        assert far(dict(mine.named_weights()), dict(theirs.named_weights())) < 5e-6
    reference = mine.reference_logprobs(batch, plan, 1.0)
    assert reference is not None
    assert (reference - theirs.reference_logprobs(batch, plan, 1.0)).abs().max() < 2e-5
    assert (reference - mine.logprobs(batch, plan, 1.0)).abs().max() > 1e-2
    for name, trainer in (("mine", mine), ("theirs", theirs)):
        trainer.export_hf(tmp_path / name)
    assert (
        far(*(load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("mine", "theirs"))) < 5e-6
    )
    configs = [json.loads((tmp_path / name / "adapter/adapter_config.json").read_text()) for name in ("mine", "theirs")]
    assert configs[0] == configs[1]
    merged = fsdp2(tmp_path / "mine", lora={"rank": 0}).logprobs(batch, plan, 1.0)
    assert (merged - mine.logprobs(batch, plan, 1.0)).abs().max() < 2e-5


MIXED = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}
OVERLAPPED = {"overlap_gradients": True, "overlap_parameters": True}
SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
SOME: dict[str, list[dict[str, Any]]] = {
    "qwen2": [SEQUENCE | {"recompute": "full"}, {"pipeline_parallel": 2}, OVERLAPPED],
    "qwen3": [{"tensor_parallel": 2}],
    "deepseek_v3": [MIXED],
}
OTHERS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2, "recompute": "full"},
        {"context_parallel": 2},
        {"distributed_optimizer": False},
    ],
    "qwen3": [SEQUENCE],
    "llama": [{"pipeline_parallel": 2, "virtual_pipeline": 2}],
    "qwen2_moe": [MIXED],
    "qwen3_next": [MIXED],
}
"""The models of qwen3 have one key head, so a tensor-parallel rank has queries only, or keys as well."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 1},
    "llama": {"num_hidden_layers": 4},
    "qwen3_next": {"layer_types": ["full_attention", "linear_attention"]},
}


def _on_two_ranks(scratch: Path, splits: dict[str, list[dict[str, Any]]]) -> None:
    whole, plan = make_batch(LENGTHS), [[0], [1, 2, 3]]
    for family, of_family in splits.items():
        folder, want = scratch / family, torch.load(scratch / f"{family}.pt")
        for split in of_family:
            at = f"{family} {split}"
            trainer = engine(folder, seed=1, **split)
            assert len(trainer.load(scratch / f"{family}.state")) == 1  # of one rank
            assert far(of_all_stages(dict(trainer.named_weights())), want["weights"]) == 0, at
            for compute in (trainer.logprobs, trainer.reference_logprobs):
                got = compute(whole, plan, 1.0)
                if got is not None:
                    assert (got - want[compute.__name__]).abs().max() < 2e-5, at
            assert worst_difference(gradients(trainer, whole), want["gradients"]) < 1e-5, at
            check_plan(trainer, split, exact=family != "qwen3")
            step(trainer, whole)
            assert far(of_all_stages(dict(trainer.named_weights())), want["next"]) < 5e-6, at
            state = scratch / f"{at}.state"
            state.mkdir(exist_ok=True)
            write_files(state, trainer.snapshot())
            dist.barrier()
            other = engine(folder, seed=2, **split)
            assert other.load(state) == [] and other.optimizer_step == 2
            for each in (trainer, other):
                step(each, whole)
            assert far(dict(trainer.named_weights()), dict(other.named_weights())) == 0, at
            trainer.export_hf(scratch / f"{at}.hf")


def test_the_native_generator_has_the_log_probs_of_the_trainer(tmp_path: Path, world_of_one: None) -> None:
    folder = make_model_folder("qwen2_moe", tmp_path / "model")
    trainer, generator = engine(folder, lr=0.02), native(folder)
    check_generator(trainer, generator, lambda version: generator.load_weights(trainer.named_weights(), version))


def test_the_training_contract_holds_with_adapters(tmp_path: Path, world_of_one: None) -> None:
    check_contract(lambda folder: engine(folder, lr=0.02), make_model_folder("qwen2", tmp_path / "model"), tmp_path)


def test_bfloat16_adapters_have_fp32_master_weights(tmp_path: Path, world_of_one: None) -> None:
    """Steps below bfloat16 precision are not lost, and the frozen weights do not change."""
    folder, whole = make_model_folder("qwen3", tmp_path / "model"), make_batch(LENGTHS)
    trainer = engine(folder, param_dtype="bfloat16", lr=1e-4)
    frozen = {name: tensor.clone() for name, tensor in trainer.weights.parameters.items()}
    first = dict(trainer.named_weights())
    for _ in range(8):
        step(trainer, whole)
    last = dict(trainer.named_weights())
    assert {tensor.dtype for tensor in last.values()} == {torch.bfloat16}
    moved = [last[name] != first[name] for name in last if name.endswith("lora_A.weight")]
    assert torch.cat([each.flatten() for each in moved]).float().mean() > 0.2
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in trainer.weights.parameters.items())


@pytest.mark.timeout(400)
@pytest.mark.parametrize("splits", [SOME, pytest.param(OTHERS, marks=pytest.mark.soak)], ids=["some", "others"])
def test_splits_match_one_rank(splits: dict[str, list[dict[str, Any]]], tmp_path: Path, world_of_one: None) -> None:
    """Also resuming on another split, resuming bit for bit on the same, exports, and the plan."""
    whole, plan = make_batch(LENGTHS), [[0], [1, 2, 3]]
    for family in splits:
        folder = make_model_folder(family, tmp_path / family, **MODELS.get(family, {}))
        trainer = engine(folder)
        step(trainer, whole)
        state = tmp_path / f"{family}.state"
        state.mkdir()
        write_files(state, trainer.snapshot())
        want: dict[str, Any] = {"weights": dict(trainer.named_weights()), "gradients": gradients(trainer, whole)}
        want |= {f.__name__: f(whole, plan, 1.0) for f in (trainer.logprobs, trainer.reference_logprobs)}
        step(trainer, whole)
        want["next"] = {name: tensor.clone() for name, tensor in trainer.named_weights()}
        torch.save(want, tmp_path / f"{family}.pt")
        step(trainer, whole)
        trainer.export_hf(tmp_path / f"{family}.hf")
    run_ranks(2, _on_two_ranks, tmp_path, splits)
    for family, of_family in splits.items():
        for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
            one = load_file(tmp_path / f"{family}.hf" / name)
            for split in of_family:
                assert far(load_file(tmp_path / f"{family} {split}.hf" / name), one) < 2e-5, (family, split)
    with pytest.raises(ValueError, match=r"this run trains whole models \(trainer\.lora\.rank=0\)"):
        engine(tmp_path / "qwen2", lora=LoRAConfig()).load(tmp_path / "qwen2.state")


def test_other_adapters_of_another_engine_are_refused(tmp_path: Path, world_of_one: None) -> None:
    """With another base, other ranks, or other layers; before any weight has changed."""
    folder = make_model_folder("qwen2", tmp_path / "model")
    other = make_model_folder("qwen2", tmp_path / "other", initializer_range=0.1)
    mine, theirs = engine(folder), fsdp2(folder)
    wide, few = LORA.model_copy(update={"rank": 8}), LORA.model_copy(update={"target_modules": ["q_proj"]})
    for trainer, name in ((mine, "mine"), (theirs, "theirs")):
        (tmp_path / name).mkdir()
        write_files(tmp_path / name, trainer.snapshot())
    for trainer, name, why in (
        (engine(other), "theirs", rf"has adapters of {folder} with the weights .*, and this run trains adapters of"),
        (fsdp2(other), "mine", rf"has adapters of {folder} with the weights .*, and this run trains adapters of"),
        (engine(folder, lora=wide), "theirs", r"lora_\w\.weight has shape .*, this model needs"),
        (fsdp2(folder, lora=wide), "mine", r"lora_\w\.weight has shape .*, this model needs"),
        (engine(folder, lora=few), "theirs", "is of another model: it has .* tensors that this model lacks"),
        (fsdp2(folder, lora=few), "mine", "is of another model: it has .* tensors that this model lacks"),
        (engine(folder, lora=LoRAConfig()), "theirs", r"this run trains whole models \(trainer\.lora\.rank=0\)"),
        (fsdp2(folder, lora=LoRAConfig()), "mine", r"this run trains whole models \(trainer\.lora\.rank=0\)"),
    ):
        before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
        with pytest.raises(ValueError, match=why) as refused:
            trainer.load(tmp_path / name)
        assert str(refused.value).startswith(f"checkpoint {tmp_path / name}") and "\n" not in str(refused.value)
        assert far(dict(trainer.named_weights()), before) == 0


def test_routers_are_measured_only_where_they_are_trained(tmp_path: Path, world_of_one: None) -> None:
    """As in FSDP2: not with adapters, and not in a critic, whose metrics would mix with the policy's."""
    from hpcrl.engines.train.megatron.critic import MegatronCritic

    folder, batch = make_model_folder("qwen3_moe", tmp_path / "model"), make_batch(LENGTHS)
    plan = [list(range(batch.num_sequences))]
    critic = MegatronCritic(TrainerConfig(engine="megatron", logits_chunk_tokens=8), folder, total_steps=8)
    for trainer, objective, measured in (
        (engine(folder, lora=LoRAConfig()), Weighted(), True),
        (engine(folder), Weighted(), False),
        (critic, Squares(), False),
    ):
        stats = trainer.accumulate(batch, plan, objective, norms_of(batch))
        assert ("actor/moe_aux_loss" in stats) == measured
