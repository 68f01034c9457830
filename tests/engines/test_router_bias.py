"""The bias of experts in routers: moved by the load in transformers' model, on every split of Megatron and FSDP2."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.config import TrainerConfig
from hpcrl.metrics.stats import Stats
from hpcrl.rollout.batch import Batch, Norms
from tests.contracts.test_train_engine import check_weights
from tests.contracts.train import fsdp2, megatron
from tests.engines.test_megatron import make, weights_of_all_shares, write
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, process_group, run_ranks

pytestmark = pytest.mark.numerics

LENGTHS, RATE = (9, 12, 5, 14, 7), 0.125
ON_ONE: list[dict[str, Any]] = [{}, {"recompute": "full"}]
ON_TWO: list[dict[str, Any]] = [
    {},
    {"expert_parallel": 2},
    {"tensor_parallel": 2, "sequence_parallel": True},
    {"context_parallel": 2, "recompute": "full"},
    {"pipeline_parallel": 2},
]


class Infinite(Objective):
    """A loss that no step follows."""

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        return outputs.logprobs.sum() * torch.inf, {}


def _count(counts: Tensor, gate: Any, inputs: Any, found: tuple[Tensor, Tensor, Tensor]) -> None:
    counts += found[2].flatten().bincount(minlength=len(counts))


def moved(folder: Path, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The biases of the folder's model before and after a step with this batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    before, after = {}, {}
    for name, gate in ((name, part) for name, part in model.named_modules() if name.endswith("mlp.gate")):
        counts = torch.zeros(gate.num_experts)
        gate.register_forward_hook(functools.partial(_count, counts))
        before[f"{name}.e_score_correction_bias"] = gate.e_score_correction_bias.clone()
        after[f"{name}.e_score_correction_bias"] = counts
    with torch.no_grad():
        for tokens in batch.token_ids.split(batch.lengths.tolist()):
            model(tokens[None])
    for name, counts in after.items():
        assert counts.sum() == batch.num_tokens * 4
        after[name] = before[name] + RATE * (counts.mean() - counts).sign()
    return before, after


def check(folder: Path, wanted: tuple[dict[str, Tensor], dict[str, Tensor]], splits: list[Any], scratch: Path) -> None:
    """Every rank runs it."""
    before, after = wanted
    whole, saved = make_batch(LENGTHS), None
    for number, own in enumerate(splits):

        def biases(engine: Any) -> dict[str, Tensor]:
            named = weights_of_all_shares(engine)
            return {name: tensor for name, tensor in named.items() if name in before}

        def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
            return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)

        engine = make(folder, expert_bias_rate=RATE, **own)
        rank, size = engine.data_parallel_rank, engine.data_parallel_size
        batch = whole.select(list(range(rank, len(LENGTHS), size)))
        plan = [[0], list(range(1, batch.num_sequences)), []]
        engine.logprobs(batch, plan, 1.0)
        engine.train_step(batch, plan, Infinite(), norms_of(whole))
        assert same(biases(engine), before), f"{own}: moved without a step"
        engine.train_step(batch, plan, Weighted(), norms_of(whole))
        assert same(biases(engine), after), own
        state = write(engine, scratch / f"state{size}.{number}")
        resumed = make(folder, expert_bias_rate=RATE, **own)
        resumed.load(saved or state)
        assert same(biases(resumed), after), own
        saved = saved or state  # of another split from now on
        if not number:
            still = make(folder, **own)
            still.train_step(batch, plan, Weighted(), norms_of(whole))
            assert same(biases(still), before), "moved without a rate"
    engine.export_hf(scratch / f"hf{dist.get_world_size()}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_router_biases_follow_the_load_on_every_split(tmp_path: Path) -> None:
    """Padding and micro-batches change nothing, and no bias moves without a step. Checkpoints, also of another split,
    and exports have them."""
    folder = make_model_folder("deepseek_v3", tmp_path / "model", first_k_dense_replace=0)
    wanted = moved(folder, make_batch(LENGTHS))
    assert len(wanted[0]) == 2
    assert all(
        {-RATE, RATE} <= set((wanted[1][name] - wanted[0][name]).round(decimals=3).tolist()) for name in wanted[0]
    )
    with process_group(0, 1, str(tmp_path / "world")):
        check(folder, wanted, ON_ONE, tmp_path)
    run_ranks(2, check, folder, wanted, ON_TWO, tmp_path)
    for ranks in (1, 2):
        exported = load_file(tmp_path / f"hf{ranks}" / "model.safetensors")
        assert all(torch.equal(exported[name], bias) for name, bias in wanted[1].items())


FSDP2_ON_ONE: list[dict[str, Any]] = [{"activation_checkpointing": True}]
FSDP2_ON_TWO: list[dict[str, Any]] = [{}, {"context_parallel": 2}]


def make_fsdp2(
    folder: Path, dtype: torch.dtype = torch.float32, trainer: dict[str, Any] | None = None, **own: Any
) -> Any:
    from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
    from hpcrl.engines.train.fsdp2.spec import FSDP2Config

    config = TrainerConfig(lr=1e-2, max_grad_norm=100.0, logits_chunk_tokens=8, **(trainer or {}))
    return FSDP2Engine(config, folder, own=FSDP2Config(**own), dtype=dtype, total_steps=8)


def check_fsdp2(folder: Path, wanted: tuple[dict[str, Tensor], dict[str, Tensor]], splits: list[Any], to: Path) -> None:
    """Every rank runs it."""
    before, after = wanted
    whole = make_batch(LENGTHS)

    def assert_biases(engine: Any, expected: dict[str, Tensor]) -> None:
        found = {name: tensor for name, tensor in engine.named_weights() if name in before}
        assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)

    for number, own in enumerate(splits):
        engine = make_fsdp2(folder, expert_bias_rate=RATE, **own)
        rank, size = engine.data_parallel_rank, engine.data_parallel_size
        rows = [0, 1, 2, 3, 4] if size == 1 else [[0, 4, 3], [1, 2]][rank]
        batch = whole.select(rows)
        plan = [[1], [row for row in range(len(rows)) if row != 1], []]  # rows 0 and 3 begin alike
        engine.logprobs(batch, plan, 1.0)
        engine.train_step(batch, plan, Infinite(), norms_of(whole))
        assert_biases(engine, before)
        engine.train_step(batch, plan, Weighted(), norms_of(whole))
        assert_biases(engine, after)
        check_weights(engine)
        state = write(engine, to / f"fsdp2.{dist.get_world_size()}.{number}")
        resumed = make_fsdp2(folder, **own)
        resumed.load(state)
        assert_biases(resumed, after)
        resumed.train_step(batch, plan, Weighted(), norms_of(whole))
        assert_biases(resumed, after)  # without a rate
    engine = make_fsdp2(folder, torch.bfloat16)
    assert_biases(engine, before)  # they stay in float32 on every rank
    engine.export_hf(to / "bf16")
    exported = load_file(to / "bf16" / "model.safetensors")
    assert all(torch.equal(exported[name], bias) for name, bias in before.items())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fsdp2_moves_biases_by_the_load(tmp_path: Path) -> None:
    """Tokens of common prefixes count for each row, and recomputed layers once."""
    folder = make_model_folder("deepseek_v3", tmp_path / "model", first_k_dense_replace=0)
    wanted = moved(folder, make_batch(LENGTHS))
    with process_group(0, 1, str(tmp_path / "world")):
        check_fsdp2(folder, wanted, FSDP2_ON_ONE, tmp_path)
        with pytest.raises(ValueError, match=r"trainer\.fsdp2\.expert_bias_rate: .*mlp.gate has no bias of experts"):
            make_fsdp2(make_model_folder("qwen3_moe", tmp_path / "other"), expert_bias_rate=RATE)
    run_ranks(2, check_fsdp2, folder, wanted, FSDP2_ON_TWO, tmp_path)


def check_zero(folder: Path, before: dict[str, Tensor], to: Path) -> None:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine
    from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig

    for stage in (1, 3):
        config = TrainerConfig(engine="deepspeed", param_dtype="bfloat16", lr=1e-2, logits_chunk_tokens=8)
        own = DeepSpeedConfig(zero_stage=stage)
        engine = ZeroEngine(config, folder, zero=own, dtype=torch.bfloat16, total_steps=8)
        published = dict(engine.named_weights())
        kinds = {shards.name: shards.dtype for shards in engine.weight_layout()}
        assert kinds == {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in published.items()}
        assert {kinds[name] for name in kinds.keys() - before.keys()} == {"bfloat16"}
        assert all(torch.equal(published[name], bias) for name, bias in before.items()), "rounded or not published"
        assert [tensor.dtype for tensor in engine.local_shards()] == [t.dtype for t in published.values()]
        engine.export_hf(to / f"zero{stage}")
        exported = load_file(to / f"zero{stage}" / "model.safetensors")
        assert all(torch.equal(exported[name], bias) for name, bias in before.items())


@pytest.mark.slow
def test_deepspeed_publishes_biases_in_float32(tmp_path: Path) -> None:
    folder = make_model_folder("glm4_moe", tmp_path / "model", first_k_dense_replace=0, moe_intermediate_size=16)
    stored = load_file(folder / "model.safetensors")
    before = {name: tensor for name, tensor in stored.items() if name.endswith("e_score_correction_bias")}
    assert len(before) == 2 and all(tensor.dtype == torch.float32 for tensor in before.values())
    with process_group(0, 1, str(tmp_path / "world")):
        check_zero(folder, before, tmp_path)


@pytest.mark.slow
def test_frozen_routers_keep_their_biases_and_have_no_losses(tmp_path: Path) -> None:
    """A frozen router's losses would move what is before it."""
    folder = make_model_folder("deepseek_v3", tmp_path / "model", first_k_dense_replace=0)
    before, after = moved(folder, batch := make_batch(LENGTHS))
    after = {name: (before if name.startswith("model.layers.1.") else after)[name] for name in before}
    last, plan = {"freeze": ["model.layers.1.mlp.gate.*"]}, [list(range(len(LENGTHS)))]
    losses = {"aux_loss": 5.0, "z_loss": 5.0}

    def attention(build: Any, contract: Any, trainer: dict[str, Any], **own: Any) -> Tensor:
        engine = build(folder, trainer=trainer, **own)
        found = contract.gradients(engine, batch, plan, Weighted(), norms_of(batch))
        return found["model.layers.1.self_attn.o_proj.weight"]

    with process_group(0, 1, str(tmp_path / "world")):
        for build, contract in ((make_fsdp2, fsdp2), (make, megatron)):
            engine = build(folder, trainer=last, expert_bias_rate=RATE)
            engine.train_step(batch, plan, Weighted(), norms_of(batch))
            found = {name: tensor for name, tensor in engine.named_weights() if name in before}
            assert all(torch.equal(found[name], after[name]) for name in before), build
            alone = attention(build, contract, last)
            assert torch.equal(attention(build, contract, last, **losses), alone), build
            assert not torch.allclose(attention(build, contract, {}, **losses), alone, rtol=0.1), build
            for key in ("aux_loss", "expert_bias_rate"):
                with pytest.raises(
                    ValueError, match=rf"\.{key}: it trains routers, and trainer\.freeze has all of them"
                ):
                    build(folder, trainer={"freeze": ["*.mlp.gate.weight"]}, **{key: RATE})
