"""Megatron-Core beyond the contracts: refused models, bfloat16, checkpoints on another split, exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.config import TrainerConfig
from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.megatron.spec import MegatronConfig
from hpcrl.rollout.batch import Batch
from hpcrl.spec.extras import without
from hpcrl.spec.trajectory import declare
from tests.checkpoint.writing import write_files
from tests.contracts.train import fsdp2, megatron
from tests.engines.worlds import (
    Weighted,
    make_batch,
    make_model_folder,
    norms_of,
    process_group,
    run_ranks,
    worst_difference,
)

if TYPE_CHECKING:
    from hpcrl.engines.train.megatron.engine import MegatronEngine

pytestmark = pytest.mark.numerics

LENGTHS = (9, 12, 5, 14)
ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN = ROPE | {"rope_type": "yarn", "original_max_position_embeddings": 16}


def make(folder: Path, trainer: dict[str, Any] | None = None, **own: Any) -> MegatronEngine:
    from hpcrl.engines.train.megatron.engine import MegatronEngine

    settings = {"lr": 1e-2, "max_grad_norm": 100.0, "logits_chunk_tokens": 8} | (trainer or {})
    config = TrainerConfig(engine="megatron", **settings)
    return MegatronEngine(config, folder, own=MegatronConfig(**own), total_steps=8)


def train(engine: MegatronEngine) -> None:
    whole = make_batch(LENGTHS)
    rows = list(range(engine.data_parallel_rank, len(LENGTHS), engine.data_parallel_size))
    batch = whole.select(rows)
    engine.train_step(batch, [[0], list(range(1, len(rows)))], Weighted(0.7), norms_of(whole))


def weights_of_all_shares(engine: MegatronEngine) -> dict[str, Tensor]:
    """The weights of all pipeline stages. Collective."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, dict(engine.named_weights()))
    return {name: tensor for share in shares for name, tensor in share.items()}


def write(engine: MegatronEngine, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    write_files(folder, engine.snapshot())
    dist.barrier()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "error"),
    [
        ("gemma2", {}, "the megatron trainer trains qwen2, .*, not gemma2; use trainer.engine=fsdp2"),
        ("deepseek_v3", {"rope_interleave": False}, "has no rope_interleave=false"),
        ("deepseek_v3", {"norm_topk_prob": False}, "has no norm_topk_prob=false with sigmoid scores"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "chooses 5 experts per token, and topk_group=2 groups have only 4"),
        ("mixtral", {"num_experts_per_tok": 1}, "has no normalised weights of a single expert per token"),
        ("mixtral", {"router_jitter_noise": 0.1}, r"adds no noise to router inputs \(router_jitter_noise=0.1\)"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "has no swiglu_alpha=1.0, only 1.702"),
        ("qwen3_next", {"attention_bias": True}, "has no attention_bias=true"),
        ("qwen3_next", {"rope_parameters": YARN}, "has no rope_type=yarn, only default, linear, llama3"),
        ("qwen2", {"quantization_config": {"quant_method": "fp8"}}, "has no quantised weights"),
        ("llama", {"attention_bias": True}, "has no attention_bias=true"),
        ("llama", {"rope_parameters": ROPE}, "has no rope_type=dynamic, only default, linear, llama3, yarn"),
    ],
)
def test_unsupported_models_are_refused(family: str, changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    folder = make_model_folder(family, tmp_path / "model", **changes)
    with process_group(0, 1, str(tmp_path / "world")), pytest.raises(ValueError, match=f"^model.path .*{error}"):
        make(folder)


@pytest.mark.slow
def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = make_model_folder("qwen2", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    with process_group(0, 1, str(tmp_path / "world")):
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(ValueError, match=re.escape("the weights lack model.norm.weight")):
            make(folder)
        save_file({**weights, "model.norm.weight": norm[:-1]}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=re.escape("model.norm.weight has shape [31], config.json requires [32]")):
            make(folder)
        (folder / "model.safetensors").write_bytes(b"no tensors")
        with pytest.raises(ValueError, match="cannot be read"):
            make(folder)
        (folder / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"no model\.safetensors or model\.safetensors\.index\.json"):
            make(folder)


@pytest.mark.slow
def test_a_gpu_without_transformer_engine_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core builds its layers from names that it has not imported."""
    from hpcrl.engines.train.megatron.gpt_model import check_layers

    check_layers(on_gpu=False)
    with without("transformer_engine"), pytest.raises(ValueError, match=r"needs transformer_engine: .*megatron\.def"):
        check_layers(on_gpu=True)
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    check_layers(on_gpu=True)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_recompute_key_decides_what_is_recomputed(on_gpu: bool) -> None:
    from hpcrl.engines.train.megatron.gpt_model import recomputation

    asked = {value: recomputation(MegatronConfig(recompute=value), on_gpu) for value in ("none", "selective", "full")}
    of_attention = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    assert asked["none"] == {} and asked["selective"] == ({} if on_gpu else of_attention)
    assert asked["full"] == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


@pytest.mark.slow
def test_padded_offsets_are_given_only_for_padded_sequences() -> None:
    """Transformer Engine would compare padded and unpadded offsets on the host in every layer."""
    from hpcrl.engines.train.megatron.packing import pack

    alone, shared = (pack(make_batch(LENGTHS), ranks, 0, 1).sequences for ranks in (1, 2))
    assert alone.cu_seqlens_q.tolist() == [0, 9, 21, 26, 40]
    assert alone.cu_seqlens_q_padded is alone.cu_seqlens_kv_padded is None
    assert shared.cu_seqlens_q.tolist() == [0, 12, 24, 32, 48]
    assert shared.cu_seqlens_q_padded is shared.cu_seqlens_kv_padded is shared.cu_seqlens_q


@pytest.mark.slow
def test_bfloat16_keeps_fp32_master_weights(tmp_path: Path) -> None:
    """Log-probs match fp32 up to rounding; a step below bfloat16 precision is not lost; and a resumed run has the same
    master weights."""
    folder = make_model_folder("qwen3", tmp_path / "model")
    batch = make_batch(LENGTHS)
    with process_group(0, 1, str(tmp_path / "world")):
        exact = make(folder).logprobs(batch, [[0, 1, 2, 3]], 1.0)
        engine = make(folder, {"param_dtype": "bfloat16", "lr": 1e-4})
        rounded = engine.logprobs(batch, [[0, 1, 2, 3]], 1.0)
        assert exact is not None and rounded is not None
        assert 0 < (exact - rounded)[batch.loss_mask].abs().mean() < 0.05
        before = dict(engine.named_weights())
        assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
        for _ in range(3):
            train(engine)
        other = make(folder, {"param_dtype": "bfloat16", "lr": 1e-4})
        assert other.load(write(engine, tmp_path / "state")) == []
        masters = [
            [engine.optimizer.state_of(p)[1]["fp32_param"] for p in engine.weights.parameters.values()]  # type: ignore[union-attr]
            for engine in (engine, other)
        ]
        assert all(torch.equal(one, two) for one, two in zip(*masters, strict=True))
        for _ in range(20):
            train(engine)
            train(other)
        after, resumed = dict(engine.named_weights()), dict(other.named_weights())
        assert all(torch.equal(after[name], resumed[name]) for name in after)
        moved = after["model.layers.0.mlp.up_proj.weight"] != before["model.layers.0.mlp.up_proj.weight"]
        assert moved.float().mean() > 0.5  # one step is less than half a bfloat16 rounding step


def _resume_on_other_splits(model: Path, experts: Path, untied: Path, scratch: Path) -> None:
    first = make(model, tensor_parallel=2, sequence_parallel=True)
    train(first)
    folder = write(first, scratch / "state")
    saved = weights_of_all_shares(first)
    train(first)
    wanted = weights_of_all_shares(first)
    start = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict())
    for own in ({"pipeline_parallel": 2}, {"context_parallel": 2}, {"distributed_optimizer": False}):
        other = make(model, **own)
        assert other.load(folder) == [] and other.optimizer_step == 1
        loaded = weights_of_all_shares(other)
        assert loaded.keys() == saved.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved), own
        train(other)
        resumed = weights_of_all_shares(other)
        # One step of Adam moves a number by lr; lost or mixed-up moments would move it differently.
        differences = [(resumed[name] - wanted[name]).abs().mean() for name in saved]
        assert max(differences) < 1e-5, own
    assert any((wanted[name] - start[name]).abs().mean() > 1e-3 for name in saved)

    from megatron.core import dist_checkpointing

    reader = make(model, tensor_parallel=2)
    read = dist_checkpointing.load(reader.chunks[0].module.sharded_state_dict(), str(folder))
    reader.chunks[0].module.load_state_dict(read, strict=False)
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights_of_all_shares(reader).items())

    mixed = make(experts, expert_parallel=2)
    train(mixed)
    folder = write(mixed, scratch / "experts.state")
    mixed.export_hf(scratch / "experts.hf")
    saved = weights_of_all_shares(mixed)
    for own in ({}, {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2}):
        other = make(experts, **own)
        assert other.load(folder) == []
        loaded = weights_of_all_shares(other)
        assert all(torch.equal(saved[name], loaded[name]) for name in saved), own
    exported = make(model, pipeline_parallel=2)
    exported.load(scratch / "state")
    exported.export_hf(scratch / "hf")

    # Only the last stage of a model with a head of its own has a tensor that a tied model lacks.
    other = make(untied, pipeline_parallel=2)
    folder = write(other, scratch / "untied.state")
    assert other.load(folder) == []
    before = weights_of_all_shares(exported)
    with pytest.raises(ValueError, match=r"of another model: it has 1 tensors .*, such as output_layer\.weight"):
        exported.load(folder)
    after = weights_of_all_shares(exported)
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items()), "nothing was read"


@pytest.mark.slow
def test_checkpoints_and_exports_of_two_ranks_are_correct(tmp_path: Path) -> None:
    """TP2 resumes as PP2, CP2 and DP2, EP2 as DP2 and ETP2; Megatron's own reader finds the same weights; the exported
    models are those that were trained; a checkpoint with weights that the model lacks is refused on all ranks."""
    model = make_model_folder("qwen2", tmp_path / "model", num_hidden_layers=2)
    experts = make_model_folder("qwen3_moe", tmp_path / "experts")
    untied = make_model_folder("qwen2", tmp_path / "untied", num_hidden_layers=2, tie_word_embeddings=False)
    run_ranks(2, _resume_on_other_splits, model, experts, untied, tmp_path)
    for name, origin, state in (("hf", model, "state"), ("experts.hf", experts, "experts.state")):
        content = json.loads((tmp_path / name / "config.json").read_text())
        assert content["dtype"] == "float32"
        assert load_file(tmp_path / name / "model.safetensors").keys() == load_file(origin / "model.safetensors").keys()
        with process_group(0, 1, str(tmp_path / f"{name}.world")):
            engine = make(origin)
            (warned,) = engine.load(tmp_path / state)
            assert "written by 2 trainer ranks, now there are 1" in warned
            saved = dict(engine.named_weights())
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).state_dict()
        assert all(torch.equal(exported[key], tensor) for key, tensor in saved.items())


ROUTES = RouteShape(num_layers=2, experts_per_token=2, num_experts=4)


def routed_batch() -> Batch:
    """Random routes that no router would choose, and none for some tokens."""
    batch = make_batch(LENGTHS)
    declare(ROUTES.field)
    generator = torch.Generator().manual_seed(3)
    draws = torch.rand(batch.num_tokens, ROUTES.num_layers, ROUTES.num_experts, generator=generator)
    routes = draws.topk(ROUTES.experts_per_token, -1).indices.flatten(1).to(torch.uint8)
    routes[batch.position_ids < 4] = ROUTES.field.fill
    batch.routes = routes
    return batch


def _replay(folder: Path, wanted: Tensor, gradients: dict[str, Tensor]) -> None:
    from hpcrl.engines.train.megatron.engine import MegatronEngine

    whole, objective = routed_batch(), Weighted(0.7)
    for own in (
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
        {"context_parallel": 2},
        {"pipeline_parallel": 2, "recompute": "full"},
    ):
        config = TrainerConfig(engine="megatron", logits_chunk_tokens=8)
        engine = MegatronEngine(config, folder, own=MegatronConfig(**own), total_steps=8, replay=True)
        plan = [[0, 1], [2], [3]]
        got = engine.logprobs(whole, plan, 0.7)
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5, msg=lambda text, own=own: f"{own}: {text}")
        found = megatron.gradients(engine, whole, plan, objective, norms_of(whole))
        assert worst_difference(found, {name: gradients[name] for name in found}) < 1e-5, own


@pytest.mark.slow
def test_replayed_experts_match_fsdp2(tmp_path: Path) -> None:
    """Log-probs and gradients with given experts, on any ranks and with recomputed layers; different experts give
    different results."""
    folder = make_model_folder("qwen3_moe", tmp_path / "model", norm_topk_prob=True)
    batch = routed_batch()
    with process_group(0, 1, str(tmp_path / "world")):
        config = TrainerConfig(logits_chunk_tokens=8)
        engine = FSDP2Engine(config, folder, dtype=torch.float32, total_steps=8, replay=True)
        wanted = engine.logprobs(batch, [[0, 1, 2, 3]], 0.7)
        gradients = fsdp2.gradients(engine, batch, [[0, 1, 2, 3]], Weighted(0.7), norms_of(batch))
        free = FSDP2Engine(config, folder, dtype=torch.float32, total_steps=8).logprobs(batch, [[0, 1, 2, 3]], 0.7)
    assert wanted is not None and free is not None and (wanted - free).abs().max() > 0.1
    run_ranks(2, _replay, folder, wanted, gradients)


@pytest.mark.slow
def test_megatron_has_no_packed_gated_delta_layer() -> None:
    """Why Qwen3-Next is not trained."""
    from types import SimpleNamespace

    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    layer: Any = SimpleNamespace(sp_size=1)
    with pytest.raises(NotImplementedError, match="GDN does not support packed sequence"):
        GatedDeltaNet.forward(layer, torch.zeros(4, 1, 8), attention_mask=None, packed_seq_params=SimpleNamespace())
