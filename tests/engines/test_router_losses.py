"""The losses of routers in every training engine, against the formulas on transformers' router logits, whatever the
split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.config import parse
from hpcrl.engines.train.megatron.spec import MegatronConfig, divide
from hpcrl.metrics.stats import flatten, merge
from hpcrl.rollout.batch import Batch, Norms
from tests.contracts.train import deepspeed, fsdp2, megatron
from tests.engines.worlds import (
    Weighted,
    make_batch,
    make_model_folder,
    process_group,
    run_ranks,
    worst_difference,
)

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

TOPK, AUX, Z = 2, 0.3, 0.02
LOSSES = {"aux_loss": AUX, "z_loss": Z}
ON_ONE: list[dict[str, Any]] = [{}, {"recompute": "full"}, {"aux_loss": 0.0, "z_loss": 0.0}]
ON_TWO: list[dict[str, Any]] = [
    {"expert_parallel": 2},
    {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"},
    {"context_parallel": 2},
    {"pipeline_parallel": 2},
    {"overlap_gradients": True, "overlap_parameters": True, "expert_parallel": 2},
]


FSDP2_ON_ONE: list[dict[str, Any]] = [
    {},
    {"activation_checkpointing": True},
    {"packing": "off"},
    {"aux_loss": 0.0, "z_loss": 0.0},
]
FSDP2_ON_TWO: list[dict[str, Any]] = [
    {"tensor_parallel": 2},
    {"context_parallel": 2, "activation_checkpointing": True},
    {"replicas": 2},
]
ZERO_ON_TWO: list[dict[str, Any]] = [{"zero_stage": 3, "activation_checkpointing": True}]


def weighted_batch() -> Batch:
    """Rows of different weights, and one without a token to be learned."""
    batch = make_batch((9, 12, 5, 14, 7))
    batch.weights = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0])
    batch.loss_mask[batch.row_ids == 4] = False
    return batch.check()


def norms_of(batch: Batch) -> Norms:
    assert batch.weights is not None
    return Norms(float(batch.loss_mask.sum()), float(batch.weights[:4].sum()))


def plain(
    folder: Path, batch: Batch, aux: float, z: float, topk: int = TOPK, sigmoid: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients of Weighted and of the routers' losses, and both losses as means over layers; one sequence at a
    time."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    of_layers: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, output: of_layers.append(output[0]))
    norms, rows = norms_of(batch), batch.token_ids.split(batch.lengths.tolist())
    total, losses = torch.zeros(()), torch.zeros(2)
    for row, tokens in enumerate(rows):
        of_layers.clear()
        found = model(tokens[None])
        one = batch.select([row])
        log_p = found.logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        logprobs = torch.cat([log_p.new_zeros(1), log_p]) * one.loss_mask
        weights = torch.cos(one.token_ids.float() + one.position_ids) + 0.5
        total = total - (logprobs * weights).sum() / norms.tokens
        if not one.loss_mask.any():
            continue
        assert one.weights is not None
        for logits in of_layers:  # [tokens, experts]
            experts = logits.shape[-1]
            chosen = torch.nn.functional.one_hot(logits.topk(topk, dim=-1).indices, experts).sum(1).float()
            p = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True) if sigmoid else logits.softmax(-1)
            balance = experts * (chosen.mean(0) / topk * p.mean(0)).sum()
            size = logits.logsumexp(-1).square().mean()
            share = one.weights[0] / norms.sequences
            total = total + share * (aux * balance + z * size)
            losses += share * torch.stack([balance, size]).detach() / len(of_layers)
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, losses.tolist()


def check(folder: Path, wanted: dict[str, Tensor], losses: list[float], splits: list[dict[str, Any]]) -> None:
    from hpcrl.engines.train.megatron.engine import MegatronEngine

    whole, objective = weighted_batch(), Weighted()
    for own in splits:
        config = parse({"trainer": {"engine": "megatron", "logits_chunk_tokens": 8, "megatron": {**LOSSES, **own}}})
        engine = MegatronEngine(config.trainer, folder, own=MegatronConfig(**(LOSSES | own)), total_steps=8)
        outputs = divide(config, dist.get_world_size()).outputs
        number, count = engine.data_parallel_rank, engine.data_parallel_size
        batch = whole.select(list(range(number, whole.num_sequences, count)))
        plan = [[0], list(range(1, batch.num_sequences)), []]
        engine.logprobs(batch, plan, 1.0)  # changes nothing
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, engine.accumulate(batch, plan, objective, norms_of(whole)))
        metrics = flatten(merge(shares[rank] for rank in outputs))
        assert [metrics["actor/moe_aux_loss"], metrics["actor/moe_z_loss"]] == pytest.approx(losses, rel=1e-4), own
        if not (engine.own.aux_loss or engine.own.z_loss):
            continue  # they are measured alone
        dist.all_gather_object(shares, megatron.gradients(engine, batch, plan, objective, norms_of(whole)))
        found = {name: gradient for share in shares for name, gradient in share.items()}
        difference = worst_difference(found, wanted)
        assert difference < 1e-5, f"{own}: gradients differ by {difference:.2g}"


def test_router_losses_and_gradients_match_the_formulas_on_every_split(tmp_path: Path) -> None:
    """In any micro-batches; rows without tokens to be learned, and padding, have no part. Without the losses the
    routers' gradients are others, and the metrics the same."""
    folder = make_model_folder("qwen3_moe", tmp_path / "model", norm_topk_prob=True)
    wanted, losses = plain(folder, weighted_batch(), AUX, Z)
    for without, _ in (plain(folder, weighted_batch(), 0.0, Z), plain(folder, weighted_batch(), AUX, 0.0)):
        router = "model.layers.0.mlp.gate.weight"
        assert worst_difference({router: without[router]}, {router: wanted[router]}) > 1e-3
    with process_group(0, 1, str(tmp_path / "world")):
        check(folder, wanted, losses, ON_ONE)
    run_ranks(2, check, folder, wanted, losses, ON_TWO)


def check_shared(
    name: str, folder: Path, wanted: dict[str, Tensor], losses: list[float], splits: list[dict[str, Any]]
) -> None:
    """As check(), for engines that compute common prefixes once: the first and the fourth row begin alike."""
    from hpcrl.spec.tables import TRAIN_ENGINES

    contract, whole, objective = {"fsdp2": fsdp2, "deepspeed": deepspeed}[name], weighted_batch(), Weighted()
    for own in splits:
        section = LOSSES | own
        config = parse({"trainer": {"engine": name, "logits_chunk_tokens": 8, "lr": 0.01, name: section}})
        engine = made(name, config, folder)
        outputs = TRAIN_ENGINES[name].division(config, dist.get_world_size()).outputs
        number, count = engine.data_parallel_rank, engine.data_parallel_size
        batch = whole.select([0, 3, 4] if number == 0 else [1, 2]) if count == 2 else whole
        plan = [list(range(0, batch.num_sequences, 2)), list(range(1, batch.num_sequences, 2)), []]
        if count == 1:
            plan = [[2], [0, 1, 3, 4], []]
        engine.logprobs(batch, plan, 1.0)
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, engine.accumulate(batch, plan, objective, norms_of(whole)))
        engine.discard_gradients()
        metrics = flatten(merge(shares[rank] for rank in outputs))
        assert [metrics["actor/moe_aux_loss"], metrics["actor/moe_z_loss"]] == pytest.approx(losses, rel=1e-4), own
        if not (section["aux_loss"] or section["z_loss"]):
            continue
        found = contract.gradients(engine, batch, plan, objective, norms_of(whole))
        difference = worst_difference(found, wanted)
        assert difference < 1e-5, f"{own}: gradients differ by {difference:.2g}"


def made(name: str, config: Any, folder: Path) -> Any:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine
    from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig
    from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
    from hpcrl.engines.train.fsdp2.spec import FSDP2Config

    given: dict[str, Any] = {"dtype": torch.float32, "total_steps": 8}
    if name == "fsdp2":
        return FSDP2Engine(config.trainer, folder, own=config.trainer.section(FSDP2Config), **given)
    return ZeroEngine(config.trainer, folder, zero=config.trainer.section(DeepSpeedConfig), **given)


@pytest.mark.timeout(600)
def test_losses_with_fsdp2_and_deepspeed_match_the_formulas(tmp_path: Path) -> None:
    """Tokens of common prefixes count for each row; recomputed layers are measured once."""
    folder = make_model_folder("qwen3_moe", tmp_path / "model", norm_topk_prob=True)
    wanted, losses = plain(folder, weighted_batch(), AUX, Z)
    latent = make_model_folder("deepseek_v3", tmp_path / "latent")
    with process_group(0, 1, str(tmp_path / "world")):
        check_shared("fsdp2", folder, wanted, losses, FSDP2_ON_ONE)
        check_shared("fsdp2", latent, *plain(latent, weighted_batch(), AUX, Z, 4, sigmoid=True), [{}])
    run_ranks(2, check_shared, "fsdp2", folder, wanted, losses, FSDP2_ON_TWO)
    run_ranks(2, check_shared, "deepspeed", folder, wanted, losses, ZERO_ON_TWO)
