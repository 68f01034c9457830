"""A training step of models with recurrent layers: rows packed, one row at a time, and as transformers' padded batch.
Prints one JSON line.

    python -m tests.bench.hybrids [--repeats 3] [--only qwen3_next ...] [--tokens 8192] [--width 64]

FSDP2 on one rank and one thread, fp32, with transformers' recurrence in plain torch; four layers, one of them
attention, micro-batches of at most 4,096 tokens. Rows of 64, of 512, and of 64 to 512 tokens (log-uniform). For every
model and kind of row: microseconds of CPU time per trained token with packing, the best of the repeats; over_rows and
over_padded, the median ratios of the CPU time of one row at a time, and of plain transformers with rows padded to the
micro-batch's longest, to it within a repeat.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.algorithms.interface import Outputs
from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.rollout.batch import Batch, Norms
from tests.bench.machine import tell
from tests.engines.worlds import Weighted, make_batch, norms_of

MICRO_BATCH = 4096
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}


def sizes(width: int) -> dict[str, dict[str, Any]]:
    head, common = width // 4, {"vocab_size": 512, "hidden_size": width, "intermediate_size": 2 * width} | ATTENTION
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    return {
        "qwen3_next": common
        | experts
        | {"num_hidden_layers": 4, "head_dim": head, "shared_expert_intermediate_size": width}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": head, "linear_value_head_dim": head},
        "nemotron_h": common
        | {"num_hidden_layers": 8, "hybrid_override_pattern": "M-M-*-M-", "head_dim": head}
        | {"mamba_num_heads": 8, "mamba_head_dim": head, "ssm_state_size": head, "n_groups": 2, "chunk_size": 64},
        "lfm2": common | {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    }


def lengths(kind: str, tokens: int) -> list[int]:
    if kind != "64_to_512":
        return [int(kind)] * (tokens // int(kind))
    drawn = np.exp(np.random.default_rng(0).uniform(np.log(64), np.log(512), tokens)).astype(int)
    return drawn[: np.searchsorted(drawn.cumsum(), tokens)].tolist()


def micro_batches(rows: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for row in sorted(range(len(rows)), key=lambda row: -rows[row]):
        if sum(rows[other] for other in found[-1]) + rows[row] > MICRO_BATCH:
            found.append([])
        found[-1].append(row)
    return found


class PaddedTrainer:
    """Plain transformers on right-padded micro-batches, with torch's AdamW."""

    def __init__(self, folder: Path):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6)

    def train_step(self, batch: Batch, plan: list[list[int]], objective: Weighted, norms: Norms) -> None:
        """A step on the micro-batches of `plan`."""
        for rows in plan:
            part = batch.select(rows)
            lengths = part.segment_lengths.tolist()
            tokens = pad_sequence(part.token_ids.long().split(lengths), batch_first=True)
            real = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
            logits = self._model(input_ids=tokens, attention_mask=real.long(), use_cache=False).logits
            logprobs = -cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            whole = pad(logprobs.view(len(rows), -1), (1, 0))
            loss, _ = objective.loss(Outputs(whole[real]), part, norms)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def seconds(trainer: FSDP2Engine | PaddedTrainer, rows: list[int]) -> float:
    """CPU time of a step."""
    batch, plan = make_batch(rows, num_prompt_tokens=16), micro_batches(rows)
    start = time.process_time()
    trainer.train_step(batch, plan, Weighted(), norms_of(batch))
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--only", nargs="+", default=list(sizes(64)))
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as root:
        dist.init_process_group("gloo", init_method=f"file://{root}/world", rank=0, world_size=1)
        for name in args.only:
            torch.manual_seed(0)
            config = AutoConfig.for_model(name, **sizes(args.width)[name])
            AutoModelForCausalLM.from_config(config).save_pretrained(folder := Path(root) / name)
            trainers: list[FSDP2Engine | PaddedTrainer] = [
                FSDP2Engine(
                    TrainerConfig(), folder, own=FSDP2Config(packing=packing), dtype=torch.float32, total_steps=99
                )
                for packing in ("require", "off")
            ]
            trainers.append(PaddedTrainer(folder))
            for kind in ("64", "512", "64_to_512"):
                rows = lengths(kind, args.tokens)
                for trainer in trainers:
                    seconds(trainer, rows[:2])
                found = [[seconds(trainer, rows) for trainer in trainers] for _ in range(args.repeats)]
                figures[f"{name}_{kind}_us_per_token"] = round(1e6 * min(own for own, *_ in found) / sum(rows), 1)
                for other, against in enumerate(("rows", "padded"), start=1):
                    ratio = median(turn[other] / turn[0] for turn in found)
                    figures[f"{name}_{kind}_over_{against}"] = round(ratio, 2)
        dist.destroy_process_group()
    tell({"bench": "hybrids", "width": args.width} | figures)


if __name__ == "__main__":
    main()
