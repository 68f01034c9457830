"""A trainer resumes from another engine's checkpoint: weights, moments and step bit for bit, and the same next step.

Each engine's checkpoint is compared through StoredState, and StoredState with torch's own reader. That moments belong
to the right weights shows in the next step, whose update they make.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig
from hpcrl.engines.train.fsdp2.checkpoint import Layout
from hpcrl.engines.train.fsdp2.critic import FSDP2Critic
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.engines.train.megatron.spec import MegatronConfig
from hpcrl.engines.train.stored_state import MOMENTS, opened
from hpcrl.spec.weight_layout import full_slice
from tests.checkpoint.writing import write_files
from tests.engines.test_critic import Squares
from tests.engines.test_resharding import full_tensors
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, process_group, run_ranks

pytestmark = pytest.mark.numerics

ENGINES = ("fsdp2", "deepspeed", "megatron")
LENGTHS = (9, 12, 5, 14, 7, 10)
BIAS = "e_score_correction_bias"
ADAPTERS = {"rank": 4, "alpha": 8.0, "rank_pattern": {"k_proj": 2}}


class Case(NamedTuple):
    """A model, and how each engine divides it over two ranks before and after the resume."""

    family: str
    before: dict[str, dict[str, Any]]
    after: dict[str, dict[str, Any]]
    model: dict[str, Any] = {}  # noqa: RUF012
    trainer: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    "tied": Case(
        "qwen2",
        {"fsdp2": {}, "deepspeed": {"zero_stage": 3}, "megatron": {"pipeline_parallel": 2}},
        {"fsdp2": {"tensor_parallel": 2}, "deepspeed": {"zero_stage": 1}, "megatron": {"tensor_parallel": 2}},
        {"vocab_size": 101},
    ),
    "untied, embedding frozen": Case(
        "llama",
        {"fsdp2": {"replicas": 2}, "deepspeed": {"zero_stage": 2}, "megatron": {"distributed_optimizer": False}},
        {"fsdp2": {}, "deepspeed": {"zero_stage": 3}, "megatron": {"pipeline_parallel": 2}},
        {"tie_word_embeddings": False},
        {"freeze": ["embeddings"]},
    ),
    "experts": Case(
        "qwen3_moe",
        {"fsdp2": {"tensor_parallel": 2}, "deepspeed": {"zero_stage": 3}, "megatron": {"expert_parallel": 2}},
        {
            "fsdp2": {},
            "deepspeed": {"zero_stage": 2},
            "megatron": {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2},
        },
        {"tie_word_embeddings": False},
    ),
    "biases of routers": Case(
        "glm4_moe",
        {"fsdp2": {}, "deepspeed": {"zero_stage": 3}, "megatron": {"expert_parallel": 2, "expert_bias_rate": 0.1}},
        {"fsdp2": {"context_parallel": 2}, "deepspeed": {"zero_stage": 1}, "megatron": {}},
    ),
    "bfloat16": Case(
        "qwen3",
        {"fsdp2": {}, "deepspeed": {"zero_stage": 1}, "megatron": {"tensor_parallel": 2}},
        {"fsdp2": {"tensor_parallel": 2}, "deepspeed": {"zero_stage": 3}, "megatron": {}},
        trainer={"param_dtype": "bfloat16"},
    ),
    "adapters": Case(
        "qwen2",
        {"fsdp2": {}, "deepspeed": {"zero_stage": 3}, "megatron": {"tensor_parallel": 2, "sequence_parallel": True}},
        {"fsdp2": {"replicas": 2}, "deepspeed": {"zero_stage": 1}, "megatron": {"pipeline_parallel": 2}},
        trainer={"lora": ADAPTERS},
    ),
    "adapters of a mixture": Case(
        "qwen2_moe",
        {"fsdp2": {"context_parallel": 2}, "deepspeed": {"zero_stage": 2}, "megatron": {"expert_parallel": 2}},
        {
            "fsdp2": {},
            "deepspeed": {"zero_stage": 3},
            "megatron": {"tensor_parallel": 2, "sequence_parallel": True},
        },
        trainer={"lora": ADAPTERS},
    ),
    "adapters in bfloat16": Case(
        "glm4_moe",
        {"fsdp2": {}, "deepspeed": {"zero_stage": 1}, "megatron": {"expert_parallel": 2}},
        {
            "fsdp2": {"context_parallel": 2},
            "deepspeed": {"zero_stage": 3},
            "megatron": {"distributed_optimizer": False},
        },
        {"moe_intermediate_size": 16},
        {"param_dtype": "bfloat16", "lora": ADAPTERS},
    ),
}
LONG = ("biases of routers", "bfloat16", "adapters of a mixture", "adapters in bfloat16")


def make(
    name: str, folder: Path, own: dict[str, Any], dtype: str = "float32", critic: bool = False, **keys: Any
) -> Any:
    """With this eps a step is a smooth function of gradient and moments, also where they are near zero."""
    settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 100.0, "weight_decay": 0.1} | keys
    config = TrainerConfig(engine=name, **settings)
    if name == "megatron":
        from hpcrl.engines.train.megatron.critic import MegatronCritic
        from hpcrl.engines.train.megatron.engine import MegatronEngine

        kind = MegatronCritic if critic else MegatronEngine
        return kind(config, folder, own=MegatronConfig(**own), total_steps=8)
    if name == "fsdp2":
        fsdp2 = FSDP2Critic if critic else FSDP2Engine
        return fsdp2(config, folder, own=FSDP2Config(**own), dtype=getattr(torch, dtype), total_steps=8)
    from hpcrl.engines.train.deepspeed.critic import ZeroCritic
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

    zero = ZeroCritic if critic else ZeroEngine
    return zero(config, folder, zero=DeepSpeedConfig(**own), dtype=getattr(torch, dtype), total_steps=8)


def train(engine: Any, step: int, objective: Any = None) -> None:
    whole = make_batch(LENGTHS, seed=step)
    rows = list(range(engine.data_parallel_rank, len(LENGTHS), engine.data_parallel_size))
    batch = whole.select(rows)
    engine.train_step(batch, [list(range(len(rows)))], objective or Weighted(0.7), norms_of(whole))


def save(engine: Any, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    write_files(folder, engine.snapshot())
    dist.barrier()
    return folder


def contents(folder: Path, model: Path) -> dict[tuple[str, str], Tensor]:
    """All weights and moments of a checkpoint, float32."""
    state = opened(folder, model)
    found = {
        (name, key): state.read(name, key, full_slice(shape)).float()
        for name, shape in state.shapes.items()
        for key in ("", *MOMENTS)
        if state.has(name, key)
    }
    state.close()
    return found


def differing(one: dict[Any, Tensor], other: dict[Any, Tensor], tolerance: float = 0.0) -> list[Any]:
    """Names of tensors that differ by more than this part of the tensor's largest number."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [name for name in one if (one[name] - other[name]).abs().max() > tolerance * other[name].abs().max()]


def switch_all(case: str, model: Path, scratch: Path) -> list[str]:
    """Two steps with each engine, and a third step after each resume with another. Every rank runs it."""
    family = CASES[case]
    # In fp32, sums over ranks and splits are in another order. A bfloat16 forward pass rounds elsewhere in each engine.
    tolerance = 5e-5 if "param_dtype" not in family.trainer else 5e-2
    problems = []
    for first in ENGINES:
        engine = make(first, model, family.before[first], **family.trainer)
        for step in range(2):
            train(engine, step)
        saved = save(engine, scratch / first)
        state = contents(saved, model)
        train(engine, 2)
        wanted = contents(save(engine, scratch / f"{first}.next"), model)
        trained = {name for name, key in state if key}
        changed = {name for name, key in differing(state, wanted, tolerance) if not key}
        assert changed >= trained or "param_dtype" in family.trainer, "a step changes more than is tolerated"
        for then in ENGINES:
            if then == first:
                continue
            resumed = make(then, model, family.after[then], **family.trainer)
            warned = resumed.load(saved)
            assert resumed.optimizer_step == 2
            if "megatron" in (first, then):
                assert "by another training engine: weights and optimizer are taken over, random" in warned[0]
            loaded = contents(save(resumed, scratch / f"{first}.{then}"), model)
            if different := differing(loaded, state):
                problems.append(f"{case}: {first} -> {then} loads other {different}")
            train(resumed, 2)
            after = contents(save(resumed, scratch / f"{first}.{then}.next"), model)
            for found in (after, wanted):
                for name in [name for name in found if name[0].endswith(BIAS)]:  # updated by the first engine's own key
                    del found[name]
            different = differing(after, wanted, tolerance)
            if different:
                worst = max(float((after[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in different)
                problems.append(f"{case}: {first} -> {then} steps to other {different[:3]}: {worst:.1e}")
            dist.barrier()
    return problems


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.soak) if name in LONG else name for name in CASES]
)
def test_every_engine_resumes_from_every_other(case: str, tmp_path: Path) -> None:
    family = CASES[case]
    model = make_model_folder(family.family, tmp_path / "model", **family.model)
    assert run_ranks(2, switch_all, case, model, tmp_path) == [[], []]
    # torch's own reader finds what StoredState finds in the names of transformers.
    tensors = full_tensors(tmp_path / "fsdp2")
    for (name, key), value in contents(tmp_path / "fsdp2", model).items():
        stored = tensors[f"optimizer.state.hf.{name}.{key}" if key else f"model.hf.{name}"]
        assert torch.equal(stored.float(), value), (name, key)
    with process_group(0, 1, str(tmp_path / "world")):  # a single rank has the whole of each tensor
        for first, then in (("megatron", "fsdp2"), ("fsdp2", "megatron"), ("megatron", "deepspeed")):
            engine = make(then, model, {}, **family.trainer)
            engine.load(tmp_path / first)
            again = save(engine, tmp_path / f"one.{first}.{then}")
            assert not differing(contents(again, model), contents(tmp_path / first, model)), (first, then)


@pytest.mark.slow
def test_critics_resume_with_their_heads(tmp_path: Path, world_of_one: None) -> None:
    """The head, zero at first, has weights and moments after a step."""
    model = make_model_folder("qwen2", tmp_path / "model")
    for first, then in zip(ENGINES, (*ENGINES[1:], ENGINES[0]), strict=True):
        engine = make(first, model, {}, critic=True)
        for step in range(2):
            train(engine, step, Squares())
        saved = save(engine, tmp_path / first)
        state = contents(saved, model)
        assert all(state["score.weight", key].any() and state["score.bias", key].any() for key in ("", *MOMENTS))
        resumed = make(then, model, {}, critic=True)
        resumed.load(saved)
        assert not differing(contents(save(resumed, tmp_path / f"{first}.{then}"), model), state), (first, then)
        ends = []
        for name, one in ((first, engine), (then, resumed)):
            train(one, 2, Squares())
            ends.append(contents(save(one, tmp_path / f"{first}.{then}.{name}.end"), model))
        assert not differing(*ends, tolerance=5e-5), (first, then)


@pytest.mark.slow
def test_state_in_bfloat16_is_taken_over(tmp_path: Path, world_of_one: None) -> None:
    """FSDP2 with model.dtype=bfloat16 has weights and moments in bfloat16; the other engines keep float32."""
    model, low = make_model_folder("qwen2", tmp_path / "model"), {"param_dtype": "bfloat16"}
    rounded = make("fsdp2", model, {}, "bfloat16", **low)
    train(rounded, 0)
    state = contents(save(rounded, tmp_path / "fsdp2"), model)
    for name in ("megatron", "deepspeed"):
        engine = make(name, model, {}, **low)
        engine.load(tmp_path / "fsdp2")
        assert not differing(contents(save(engine, tmp_path / name), model), state), name
        train(engine, 1)
        exact = contents(save(engine, tmp_path / name), model)
        assert any((value != value.bfloat16()).any() for value in exact.values()), "masters are not rounded"
        back = make("fsdp2", model, {}, "bfloat16", **low)
        back.load(tmp_path / name)
        again = contents(save(back, tmp_path / f"{name}.back"), model)
        assert all(torch.equal(again[place], value.bfloat16().float()) for place, value in exact.items()), name


@pytest.mark.slow
def test_other_models_and_optimizers_are_refused(tmp_path: Path, world_of_one: None) -> None:
    """And damage; each in one line with the folder, before any weight has changed."""
    model = make_model_folder("qwen2", tmp_path / "model")
    shorter = make_model_folder("qwen2", tmp_path / "shorter", num_hidden_layers=1)
    wider = make_model_folder("qwen2", tmp_path / "wider", intermediate_size=64)
    for name in ("fsdp2", "megatron"):
        save(make(name, model, {}), tmp_path / name)
    save(make("fsdp2", model, {}, optimizer="muon"), tmp_path / "muon")
    for then, folder, saved, why in (
        ("megatron", shorter, "fsdp2", r"of another model: it has 12 tensors .*model\.layers\.1\.in"),
        ("megatron", wider, "fsdp2", r"mlp\.\w+\.weight has shape \[48, 32\], this model needs \[64, 32\]"),
        ("fsdp2", shorter, "megatron", r"is a checkpoint of another model: decoder\.layers\.\w+"),
        ("deepspeed", wider, "megatron", r"of another model: .*linear_fc1.* has shape \[2, 96, 32\]"),
        ("megatron", model, "muon", "its optimizer has momentum, which AdamW has not; resume it with the trainer.opt"),
        ("deepspeed", model, "muon", "its optimizer has momentum, which AdamW has not"),
        ("fsdp2", model, "cut", "is missing"),
    ):
        if saved == "cut":
            saved = "megatron"
            (tmp_path / saved / "__0_0.distcp").unlink()
        engine = make(then, folder, {})
        before = dict(engine.named_weights())
        before = {name: tensor.clone() for name, tensor in before.items()}
        with pytest.raises(ValueError, match=why) as refused:
            engine.load(tmp_path / saved)
        assert str(tmp_path / saved) in str(refused.value) and "\n" not in str(refused.value)
        assert not differing(dict(engine.named_weights()), before) and engine.optimizer_step == 0


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A deepspeed checkpoint at step 2 with these tensors. Collective."""
    layout = Layout(copies=True)
    layout.lay_out(tensors)
    for name, place in layout.places.items():
        place.copy_(tensors[name])
    folder.mkdir()
    write_files(folder, layout.files(2))
    return folder


@pytest.mark.slow
def test_checkpoints_without_buffers_keep_the_folders(tmp_path: Path, world_of_one: None) -> None:
    """The last version's deepspeed saved no buffers. Other tensors may not be missing."""
    model = make_model_folder("glm4_moe", tmp_path / "model")
    first = make("fsdp2", model, {})
    kept = {name: tensor.clone() for name, tensor in first.named_weights() if name.endswith(BIAS)}
    train(first, 0)
    state = full_tensors(save(first, tmp_path / "fsdp2"))
    old = written(tmp_path / "old", {name: tensor for name, tensor in state.items() if not name.endswith(BIAS)})
    less = {name: tensor for name, tensor in state.items() if not name.endswith(("q_proj.weight", BIAS))}
    cut = written(tmp_path / "cut", less)
    assert kept and all(tensor.any() for tensor in kept.values())
    for name in ENGINES:
        engine = make(name, model, {})
        with pytest.raises(ValueError, match=r"q_proj\.weight"):
            engine.load(cut)
        engine.load(old)
        assert engine.optimizer_step == 2
        wanted = {name: tensor for name, tensor in first.named_weights()}
        assert not differing(dict(engine.named_weights()), wanted | kept), name
