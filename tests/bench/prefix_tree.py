"""Training on sequences with common prefixes: a step of FSDP2 that computes these once, with one that does not.

    python -m tests.bench.prefix_tree [--steps N] [--only NAME ...]

A Qwen2 of random weights (4 layers of 256, vocabulary of 2,048, fp32, one rank, one thread), all sequences in one
micro-batch. Groups of 8: prompts of 1,000 tokens and answers of 50 to 200. Episodes by steps: 8 turns of 150 tokens,
100 of them the model's; each turn's prompt repeats all earlier turns.

One JSON line per kind of rollouts. `seconds`: of the fastest step, shared and not, in turns; `speedup`: their ratio;
`flops`: the ratio of floating-point operations in matrix products and attention; `tokens`: packed, shared and not.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2.prefix_tree import share_prefixes
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.rollout.batch import Batch
from tests.bench.machine import tell
from tests.engines.worlds import Weighted, make_batch, norms_of

SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
PROMPT, ANSWERS, TURNS, TURN, OBSERVATION = 1000, (50, 200), 8, 150, 50


def groups_of_8() -> Batch:
    lengths = PROMPT + np.random.default_rng(0).integers(*ANSWERS, 8)
    batch = make_batch(lengths.tolist(), num_prompt_tokens=PROMPT)
    for row in batch.cu_seqlens[:-1].tolist():
        batch.token_ids[row : row + PROMPT] = batch.token_ids[:PROMPT]
    return batch


def episodes_by_steps() -> Batch:
    """Two episodes, whose turns are sequences of their own for the model."""
    lengths = [TURN * (turn + 1) for turn in range(TURNS)] * 2
    batch = make_batch(lengths)
    for end, length in zip(batch.cu_seqlens[1:].tolist(), lengths, strict=True):
        if length > TURN:
            start = end - length
            batch.token_ids[start : end - TURN] = batch.token_ids[start - length + TURN : start]
        batch.loss_mask[end - length : end - TURN + OBSERVATION] = False
    return batch


KINDS: dict[str, Callable[[], Batch]] = {"groups of 8": groups_of_8, "episodes by steps": episodes_by_steps}


def unshared(token_ids: torch.Tensor, lengths: list[int], _: object) -> Any:
    return share_prefixes(token_ids, lengths, [0] * len(lengths))


def model_folder(folder: Path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(folder)
    return folder


def measure(engine: fsdp2.FSDP2Engine, batch: Batch, steps: int) -> dict[str, Any]:
    everything = [list(range(batch.num_sequences))]
    seconds: dict[str, list[float]] = {"shared": [], "unshared": []}
    flops, packed = dict[str, int](), dict[str, int]()
    for number in range(steps + 1):
        for way, share in (("shared", share_prefixes), ("unshared", unshared)):
            fsdp2.share_prefixes = share
            step = functools.partial(engine.train_step, batch, everything, Weighted(), norms_of(batch))
            if number == 0:  # to warm up, and to count
                with FlopCounterMode(display=False) as counter:
                    step()
                flops[way] = counter.get_total_flops()
                packed[way] = len(share(batch.token_ids, batch.lengths.tolist(), None).kept)
                continue
            begun = time.perf_counter()
            step()
            seconds[way].append(time.perf_counter() - begun)
    best = {way: min(times) for way, times in seconds.items()}
    return {
        "seconds": {way: round(value, 2) for way, value in best.items()},
        "speedup": round(best["unshared"] / best["shared"], 2),
        "flops": round(flops["unshared"] / flops["shared"], 2),
        "tokens": packed,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        settings = TrainerConfig(lr=1e-4, max_tokens_per_micro_batch=1 << 16)
        engine = fsdp2.FSDP2Engine(
            settings, model_folder(Path(scratch) / "model"), own=FSDP2Config(), dtype=torch.float32, total_steps=9
        )
        for name in args.only:
            tell({"bench": "prefix_tree", "rollouts": name} | measure(engine, KINDS[name](), args.steps))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
