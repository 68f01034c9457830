"""Differences of the trainer's and the generator's log-probs of sampled tokens: fp32, bf16, bf16 with an fp32 head.

    python -m tests.bench.head_dtype --model FOLDER [--task task:sort_digits] [--responses N] [--tokens N]

The FSDP2 engine and the native one, on one rank each, at temperature 1. For each way, the mean absolute difference, the
root mean square and the largest, nats.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from hpcrl.data.chat import encode, render
from hpcrl.data.tasks import make_task
from hpcrl.engines.gen.generation_engine import Output, Request, SamplingParams
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.rollout.batch import Batch, batch_from_samples
from hpcrl.rollout.types import Sample
from tests.bench.machine import tell
from tests.engines.worlds import process_group
from tests.planner.measuring import make_engine

WAYS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None), "float32_head": ("bfloat16", "float32")}


def generated(engine: NativeEngine, prompts: list[list[int]], num_tokens: int) -> Batch:
    """A response to each prompt, with the generator's log-probs."""
    engine.add([Request(i, ids, SamplingParams(num_tokens, ignore_eos=True), i) for i, ids in enumerate(prompts)])
    outputs: list[Output] = []
    while engine.progress():
        outputs += engine.step(16)
    samples = []
    for output in sorted(outputs, key=lambda output: output.id):
        prompt = np.array(prompts[output.id], dtype=np.int32)
        length, before = len(prompt) + len(output.token_ids), np.zeros(len(prompt), dtype=np.float32)
        samples.append(
            Sample(
                output.id << 24,
                output.finish_reason,
                token_ids=np.concatenate((prompt, output.token_ids)),
                loss_mask=np.arange(length) >= len(prompt),
                gen_logprobs=np.concatenate((before, output.gen_logprobs)),
                versions=np.zeros(length, dtype=np.int32),
                turn_ids=np.zeros(length, dtype=np.int32),
            )
        )
    return batch_from_samples(samples, list(range(len(samples))))


def differences(
    trainer: FSDP2Engine, generator: NativeEngine, prompts: list[list[int]], num_tokens: int
) -> tuple[float, float, float]:
    """Mean absolute difference of the log-probs of the same sampled tokens, its root mean square and maximum, nats."""
    batch = generated(generator, prompts, num_tokens)
    logprobs = trainer.logprobs(batch, [list(range(len(prompts)))], 1.0)
    found = (logprobs - batch.gen_logprobs).abs()[batch.loss_mask]
    return float(found.mean()), float(found.square().mean().sqrt()), float(found.max())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--task", default="task:sort_digits")
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    if args.model is None:
        print("head_dtype needs --model, such as runs/demo_sft/hf", file=sys.stderr)
        return
    tokenizer, task = AutoTokenizer.from_pretrained(args.model), make_task(args.task, {}, None, 0, "train")
    rows = [[{"role": "user", "content": task.row(i)["prompt"]}] for i in range(args.responses)]
    prompts = [encode(tokenizer, render(tokenizer, row, None)) for row in rows]
    longest = max(map(len, prompts)) + args.tokens
    found = {}
    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, f"{folder}/store"):
        for way, (dtype, head) in WAYS.items():
            generator = NativeEngine(
                args.model,
                max_num_seqs=64,
                max_length=longest,
                dtype=getattr(torch, dtype),
                float32_head=head is not None,
            )
            trainer = make_engine(args.model, param_dtype=dtype, head_dtype=head)
            found[way] = [float(f"{d:.2g}") for d in differences(trainer, generator, prompts, args.tokens)]
    tell({"bench": "head_dtype", "responses": args.responses, "tokens": args.tokens, **found})


if __name__ == "__main__":
    main()
