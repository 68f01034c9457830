"""A loss on pairs in every training engine: its gradient on two ranks, in several micro-batches, is that of
transformers for the whole batch; and FSDP2 computes the prompt of a pair once."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.pairs.objective import CHOSEN_TOKENS, PairObjective
from hpcrl.algorithms.pairs.spec import DPOConfig
from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.rollout.batch import Batch, batch_from_samples
from hpcrl.rollout.types import FinishReason, Sample
from tests.contracts.test_train_engine import FACTORIES
from tests.engines.worlds import VOCAB, make_model_folder, norms_of, process_group, run_ranks, worst_difference

pytestmark = pytest.mark.numerics

PROMPTS, ANSWERS = (4, 7, 3), ((3, 5), (6, 2), (1, 4))
ROWS = ([0, 1, 4, 5], [2, 3])
"""The sequences of each rank: two pairs, and one."""
SECTION = {"beta": 0.5, "sft_weight": 0.3}


def pairs() -> Batch:
    """Three pairs, each with a prompt of its own, and log-probs of a reference."""
    rng = np.random.default_rng(0)
    samples = []
    for prompt, lengths in zip(PROMPTS, ANSWERS, strict=True):
        asked = rng.integers(0, VOCAB, prompt)
        for length in lengths:
            ids = np.concatenate([asked, rng.integers(0, VOCAB, length)]).astype(np.int32)
            zeros = np.zeros(len(ids), np.float32)
            samples.append(
                Sample(
                    len(samples), FinishReason.STOP, token_ids=ids, loss_mask=np.arange(len(ids)) >= prompt,
                    gen_logprobs=zeros, versions=zeros.astype(int), turn_ids=zeros.astype(int),
                )
            )  # fmt: skip
    batch = batch_from_samples(samples, [n // 2 for n in range(len(samples))])
    batch.chosen = torch.arange(len(samples)) % 2 == 0
    batch.ref_logprobs = batch.loss_mask * (torch.cos(torch.arange(batch.num_tokens)) - 1.5)
    return batch.check()


def objective() -> PairObjective:
    made = PairObjective(DPOConfig(**SECTION))
    made.coefficients = {CHOSEN_TOKENS: float(sum(chosen for chosen, _ in ANSWERS))}
    return made


def wanted(folder: Path, batch: Batch) -> dict[str, Tensor]:
    """The gradient, one sequence at a time through transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    found = []
    for tokens in batch.token_ids.split(batch.lengths.tolist()):
        log_p = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        found += [log_p.new_zeros(1), log_p.gather(1, tokens[1:, None])[:, 0]]
    objective().loss(Outputs(torch.cat(found) * batch.loss_mask), batch, norms_of(batch))[0].backward()
    return {name: p.grad for name, p in model.named_parameters()}


def on_rank(name: str, folder: Path) -> dict[str, Tensor]:
    """This rank's share of the gradient: its pairs in two micro-batches, the second of which may be empty."""
    whole, rank = pairs(), dist.get_rank()
    batch = whole.select(ROWS[rank])
    plan = [list(range(batch.num_sequences))[:2], list(range(batch.num_sequences))[2:]]
    gradients = import_module(f"tests.contracts.train.{name}").gradients
    found: dict[str, Tensor] = gradients(FACTORIES[name](folder), batch, plan, objective(), norms_of(whole))
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", sorted(set(FACTORIES) - {"fake"}))
def test_every_engine_trains_on_pairs(name: str, tmp_path: Path) -> None:
    folder = make_model_folder("qwen3", tmp_path / "model")
    shares = run_ranks(2, on_rank, name, folder)
    assert worst_difference(shares[0], wanted(folder, pairs())) < 1e-5


def test_the_prompt_of_a_pair_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def recorded(*given: Any) -> Any:
        seen.append(share(*given))
        return seen[-1]

    share = fsdp2.share_prefixes
    monkeypatch.setattr(fsdp2, "share_prefixes", recorded)
    folder, batch = make_model_folder("qwen3", tmp_path / "model"), pairs()
    with process_group(0, 1, str(tmp_path / "store")):
        engine = fsdp2.FSDP2Engine(TrainerConfig(), folder, dtype=torch.float32, total_steps=8)
        seen.clear()
        found = import_module("tests.contracts.train.fsdp2").gradients(
            engine, batch, [[0, 1, 2, 3], [4, 5]], objective(), norms_of(batch)
        )
    assert [shared.skipped[1::2] for shared in seen] == [[4, 7], [3]]
    assert worst_difference(found, wanted(folder, batch)) < 1e-5
