"""Splits of FSDP2 with its other settings, and refusals. tests/contracts/test_train_splits.py compares the splits of
every engine with transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import TrainerConfig, parse
from hpcrl.config.reading import ConfigError
from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.exchange import Axis
from hpcrl.engines.train.fsdp2.row_mixers import mixers_of
from hpcrl.engines.train.fsdp2.spec import FSDP2Config, divide, indivisible_heads
from hpcrl.engines.train.fsdp2.tensor_parallel import TensorParallel
from hpcrl.engines.train.fsdp2.weights import local
from hpcrl.rollout.batch import Batch
from hpcrl.spec.trajectory import FIELDS, declare
from tests.contracts.train.fsdp2 import gradients
from tests.engines.architectures import tiny_config
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, run_ranks, worst_difference

pytestmark = pytest.mark.numerics

LENGTHS = (9, 21, 4, 14, 5, 17)
PLAN = [[0, 1], [2, 3, 4], [5]]
ROUTES = RouteShape(num_layers=2, experts_per_token=2, num_experts=4)


def configured(num_ranks: int, **own: int) -> Any:
    return parse({"trainer": {"fsdp2": own}, "layout": {"trainer": {"num_ranks": num_ranks}}})


def test_neighbouring_ranks_work_on_the_same_rows() -> None:
    division = divide(configured(8, replicas=2, tensor_parallel=2), 8)
    assert division.groups == ((0, 1), (2, 3), (4, 5), (6, 7)) and division.outputs == (0, 2, 4, 6)
    assert division.weights == (tuple(range(8)),)
    assert divide(configured(4, context_parallel=2, tensor_parallel=2), 4).groups == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("num_ranks", "own", "message"),
    [
        (6, {"replicas": 4}, r"trainer.fsdp2.replicas: replicas 4 x tensor 1 x context 1 = 4 ranks, .* gives 6,"),
        (4, {"context_parallel": 3}, r"context_parallel: replicas 1 x tensor 1 x context 3 = 3 ranks, .* gives 4,"),
        (2, {"tensor_parallel": 2, "replicas": 2}, r"x tensor 2 x context 1 = 4 ranks, and the layout gives 2, which"),
    ],
)
def test_indivisible_numbers_of_ranks_are_refused(num_ranks: int, own: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        RoleLayout.from_config(configured(num_ranks, **own))
    lines = [line for line in str(error.value).splitlines() if "trainer.fsdp2" in line]
    assert len(lines) == 1 and re.search(message, lines[0])


@pytest.mark.parametrize(
    ("tensor", "context", "num_heads", "num_kv_heads", "message"),
    [
        (2, 2, 8, 4, None),
        (2, 4, 8, 2, None),  # four ranks share the one key head of a tensor parallel rank
        (3, 1, 8, 4, "tensor_parallel: 3 does not divide the 8 attention heads"),
        (4, 1, 8, 2, "tensor_parallel: 4 does not divide the 2 key and value heads"),
        (2, 3, 8, 4, "context_parallel: 3 does not divide the 4 attention heads of each of 2 tensor parallel ranks"),
        (1, 4, 12, 6, "context_parallel: 4 neither divides the 6 key and value heads nor is a multiple of them"),
    ],
)
def test_indivisible_numbers_of_heads_are_refused(
    tensor: int, context: int, num_heads: int, num_kv_heads: int, message: str | None
) -> None:
    own = FSDP2Config(tensor_parallel=tensor, context_parallel=context)
    problems = [problem.text for problem in indivisible_heads(own, num_heads, num_kv_heads)]
    assert problems == ([f"trainer.fsdp2.{message}"] if message else [])


def _empty(family: str, **changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, num_attention_heads=4, num_key_value_heads=2, **changes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral", "qwen3", "qwen3_moe", "gemma2", "phi3"])
def test_matrices_are_split_by_transformers_tensor_parallel_plan(family: str) -> None:
    """Every matrix of a layer is split, as are experts; norms, embedding and head are whole."""
    hf = _empty(family)
    whole = {n: tuple(p.shape) for n, p in hf.named_parameters()}
    matrices = TensorParallel(hf, Axis(size=2))
    split = {n: tuple(p.shape) for n, p in hf.named_parameters()}
    kinds = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "o_proj", "down_proj", "qkv_proj"}
    for name, shape in whole.items():
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        rows = 1 if part in ("o_proj", "down_proj") and "experts" not in name else 0
        if part not in kinds:
            assert split[name] == shape and name not in matrices.dims, name
        else:
            assert matrices.dims[name] == rows, name
            assert split[name] == tuple(n // 2 if dim == rows else n for dim, n in enumerate(shape)), name


@pytest.mark.parametrize(
    "family",
    ["nemotron_h", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "bamba", "jamba", "olmo_hybrid", "kimi_linear"],
)
def test_of_a_hybrid_all_matrices_outside_its_recurrent_mixers_are_split(family: str) -> None:
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(tiny_config(family))
    mixers = tuple(f"{name}." for name in mixers_of(hf))
    split = TensorParallel(hf, Axis(size=2)).dims
    layers = {n for n, p in hf.named_parameters() if p.ndim >= 2 and ".layers." in n and not n.startswith(mixers)}
    routers = (".gate.weight", ".router.weight", ".kv_a_proj_with_mqa.weight")
    assert mixers and not any(name.startswith(mixers) for name in split)
    assert all(name.endswith(routers) for name in layers - split.keys()) and layers & split.keys()


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("gpt2", 2, "gpt2 cannot be split: transformers has no plan for it, and its matrices have other names"),
        ("phi3", 3, "self_attn.o_proj.weight is [32, 32], and 3 does not divide 32"),
        ("llama", 5, "self_attn.q_proj.weight is [32, 32], and 5 does not divide 32"),
        ("qwen3_moe", 3, "and 3 does not divide"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_in_one_line(family: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        TensorParallel(_empty(family), Axis(size=size))
    assert str(error.value).startswith(f"trainer.fsdp2.tensor_parallel={size}: ") and "\n" not in str(error.value)


def test_a_matrix_without_its_pair_is_not_split() -> None:
    hf = _empty("llama")
    hf._tp_plan["model.layers.*.self_attn.o_proj"] = "replicated_with_grad_allreduce"
    with pytest.raises(ValueError, match=r"matrices of model\.layers\.0\.self_attn are not split in pairs"):
        TensorParallel(hf, Axis(size=2))


# ---- two ranks


def engine(folder: Path, replay: bool = False, **own: Any) -> FSDP2Engine:
    changes = {key: own.pop(key) for key in ("param_dtype", "lora") if key in own}
    config = TrainerConfig(lr=1e-3, logits_chunk_tokens=8, **changes)
    own_config = FSDP2Config(**own)
    return FSDP2Engine(config, folder, own=own_config, dtype=torch.float32, total_steps=10, replay=replay)


def gradients_of(trainer: FSDP2Engine, batch: Batch) -> dict[str, Tensor]:
    """The gradients of the whole batch, of which a data-parallel rank has some rows."""
    rows = list(range(trainer.data_parallel_rank, len(LENGTHS), trainer.data_parallel_size))
    plan = [[0], list(range(1, len(rows))), []]
    return gradients(trainer, batch.select(rows), plan, Weighted(0.7, entropy=True), norms_of(batch))


def gradients_of_adapters(folder: Path, **own: Any) -> dict[str, Tensor]:
    """The gradients of adapters that change the model."""
    trainer = engine(folder, lora={"rank": 3, "alpha": 6.0}, **own)
    for name, parameter in trainer.model.named_parameters():
        if name.endswith("lora_B.weight"):
            local(parameter).data.fill_(0.05)
    return gradients_of(trainer, make_batch(LENGTHS))


def replayed_gradients(folder: Path, **own: Any) -> dict[str, Tensor]:
    """The gradients of a batch whose tokens were routed at random."""
    batch = make_batch(LENGTHS)
    draws = torch.rand(batch.num_tokens, ROUTES.num_layers, ROUTES.num_experts, generator=torch.manual_seed(3))
    declare(ROUTES.field)
    try:
        batch.routes = draws.argsort(-1)[..., : ROUTES.experts_per_token].flatten(1).to(torch.uint8)
        return gradients_of(engine(folder, replay=True, **own), batch)
    finally:
        del FIELDS["routes"]


SPLITS: dict[str, dict[str, Any]] = {"tensor": {"tensor_parallel": 2}, "context": {"context_parallel": 2}}
COPIES: dict[str, Any] = {"replicas": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma3_text": {"sliding_window": 6},
    "mistral": {"sliding_window": 6},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"shared_expert_intermediate_size": 24},
}


def _two_ranks(folders: dict[str, Path]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    batch = make_batch(LENGTHS)
    fsdp2.SMALL_MODEL_BYTES = 0
    results["copies", "layer by layer"] = gradients_of(engine(folders["qwen3"], **COPIES), batch)
    fsdp2.SMALL_MODEL_BYTES = 4 << 30
    for split in (SPLITS["context"], COPIES):
        results["adapters", str(split)] = gradients_of_adapters(folders["qwen3"], **split)
    for name, split in SPLITS.items():
        for family in FAMILIES:
            results[name, family] = gradients_of(engine(folders[family], **split), batch)
        results[name, "offloaded"] = gradients_of(engine(folders["qwen3"], cpu_offload=True, **split), batch)
        results[name, "unpacked"] = gradients_of(engine(folders["qwen3"], packing="off", **split), batch)
        trainer = engine(folders["qwen3"], param_dtype="bfloat16", **split)
        results[name, "bfloat16"] = trainer.logprobs(batch, PLAN, 1.0)
        results[name, "experts replayed"] = replayed_gradients(folders["qwen3_moe"], **split)
        fsdp2.SMALL_MODEL_BYTES = 0
        trainer = engine(folders["qwen3"], activation_checkpointing=True, **split)
        results[name, "layer by layer"] = gradients_of(trainer, batch)
        fsdp2.SMALL_MODEL_BYTES = 4 << 30
        reference = FSDP2Engine(
            TrainerConfig(),
            folders["qwen3"],
            own=FSDP2Config(**split),
            dtype=torch.float32,
            total_steps=1,
            trainable=False,
        )
        results[name, "frozen"] = reference.logprobs(batch, PLAN, 0.7)
        results[name, "summary"] = (trainer.data_parallel_rank, trainer.data_parallel_size, trainer.num_parameters)
        try:
            engine(folders["phi3"], **split)
        except ValueError as error:
            results[name, "refused"] = str(error)
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 20}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    changes: dict[str, Any] = {"phi3": {"rope_parameters": rope, "pad_token_id": 0, "max_position_embeddings": 40}}
    changes["phi3"]["original_max_position_embeddings"] = 20
    changes |= FAMILIES
    return {
        name: make_model_folder(name, root / name, **changes.get(name, {})) for name in ("qwen3", "qwen3_moe", *changes)
    }


@pytest.fixture(scope="module")
def two_ranks(folders: dict[str, Path]) -> list[dict[Any, Any]]:
    return run_ranks(2, _two_ranks, folders)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_engine_settings_do_not_change_gradients_of_a_split(
    split: str, folders: dict[str, Path], two_ranks: list[dict[Any, Any]], world_of_one: None
) -> None:
    batch = make_batch(LENGTHS)
    plain = engine(folders["qwen3"])
    want, logprobs = gradients_of(plain, batch), plain.logprobs(batch, PLAN, 1.0)
    by_choice = replayed_gradients(folders["qwen3_moe"])
    by_itself = gradients_of(engine(folders["qwen3_moe"]), make_batch(LENGTHS))
    assert worst_difference(by_choice, by_itself) > 1e-2  # negative control: the routes matter
    in_bfloat16 = engine(folders["qwen3"], param_dtype="bfloat16").logprobs(batch, PLAN, 1.0)
    rounding = (in_bfloat16 - logprobs).abs().mean()
    for result in two_ranks:
        for name in ("offloaded", "unpacked", "layer by layer"):
            assert worst_difference(result[split, name], want) < 1e-5, name
        assert worst_difference(result[split, "experts replayed"], by_choice) < 1e-5
        assert 0 < (result[split, "bfloat16"] - logprobs).abs().mean() < 2 * rounding
        torch.testing.assert_close(result[split, "frozen"], plain.logprobs(batch, PLAN, 0.7), rtol=0, atol=1e-5)
        assert result[split, "summary"] == (0, 1, plain.num_parameters)
        assert worst_difference(result["copies", "layer by layer"], want) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_splits_do_not_change_gradients_of_other_families(
    family: str, split: str, folders: dict[str, Path], two_ranks: list[dict[Any, Any]], world_of_one: None
) -> None:
    want = gradients_of(engine(folders[family]), make_batch(LENGTHS))
    assert all(worst_difference(result[split, family], want) < 1e-5 for result in two_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("split", [SPLITS["context"], COPIES], ids=str)
def test_splits_do_not_change_gradients_of_adapters(
    split: dict[str, Any], folders: dict[str, Path], two_ranks: list[dict[Any, Any]], world_of_one: None
) -> None:
    want = gradients_of_adapters(folders["qwen3"])
    assert len(want) == 2 * 7 * 2
    assert all(worst_difference(result["adapters", str(split)], want) < 1e-5 for result in two_ranks)


@pytest.mark.slow
def test_all_ranks_refuse_a_model_that_cannot_be_split(two_ranks: list[dict[Any, Any]]) -> None:
    for result in two_ranks:
        for name in SPLITS:
            assert f"{name}_parallel=2 " in result[name, "refused"]
            assert "needs a model that can be packed; phi3 cannot: rope_type" in result[name, "refused"]
