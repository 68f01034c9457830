"""The TRL side of tests/bench/vs_trl.py: GRPOTrainer on a jsonl of prompts and answers, run in .venv-trl on the CPU.

Started once per process by torchrun, or alone with several threads. Rank 0 prints one JSON line. With --steps 0 nothing
is trained: the line holds the validation accuracy of the model folder, so that both sides are judged by one program.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerControl, TrainerState
from trl import GRPOConfig, GRPOTrainer

Row = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="HF folder with tokenizer and chat template")
    parser.add_argument("--train", required=True, help='jsonl of {"prompt", "answer"}')
    parser.add_argument("--val", required=True, help="the same, held out")
    parser.add_argument("--steps", type=int, required=True, help="rollout batches; 0: only evaluate")
    parser.add_argument("--warmup-steps", type=int, default=2, help="rollout batches that are not timed")
    parser.add_argument("--num-prompts", type=int, default=64, help="prompts of a rollout batch")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--optimizer-steps", type=int, default=4, help="mini-batches of a rollout batch")
    parser.add_argument("--micro-batch", type=int, default=0, help="rows of a forward per process; 0: the mini-batch")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"])
    parser.add_argument(
        "--continuous-batching",
        type=json.loads,
        default=None,
        help="generate with transformers' paged engine; JSON arguments of its ContinuousBatchingConfig",
    )
    parser.add_argument("--val-rows", type=int, default=256, help="held-out rows to evaluate at the end; 0: none")
    parser.add_argument("--save", default="", help="write the trained model to this folder")
    return parser.parse_args()


def read_rows(path: str) -> list[Row]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def exact_line(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 for a response that is the answer and nothing else."""
    return [float(reply[0]["content"].strip() == expected) for reply, expected in zip(completions, answer, strict=True)]


class Stopwatch(TrainerCallback):
    """Wall and CPU seconds from the end of the last warm-up batch to the end of training, and lengths on the way."""

    def __init__(self, warmup_optimizer_steps: int):
        self.warmup, self.begin, self.end = warmup_optimizer_steps, (0.0, 0.0), (0.0, 0.0)
        self.lengths: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begin = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.end = time.perf_counter(), time.process_time()
        if state.global_step == self.warmup:
            self.begin = self.end

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "completions/mean_length" in logs:
            self.lengths.append(logs["completions/mean_length"])

    @property
    def wall_s(self) -> float:
        return self.end[0] - self.begin[0]

    @property
    def cpu_s(self) -> float:
        return self.end[1] - self.begin[1]


def load(options: argparse.Namespace) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation=options.attention
    )


def make_trainer(options: argparse.Namespace, stopwatch: Stopwatch) -> GRPOTrainer:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    mini_batch = options.num_prompts * options.group_size // options.optimizer_steps // processes
    micro_batch = options.micro_batch or mini_batch
    config = GRPOConfig(
        output_dir=os.environ.get("TMPDIR", "/tmp"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=options.seed,
        max_steps=options.steps * options.optimizer_steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=mini_batch // micro_batch,
        generation_batch_size=options.num_prompts * options.group_size,
        num_generations=options.group_size,
        max_completion_length=options.max_new_tokens,
        temperature=1.0,
        top_k=0,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards="group",
        use_transformers_continuous_batching=options.continuous_batching is not None,
        transformers_continuous_batching_config=options.continuous_batching,
        ddp_find_unused_parameters=False,
        logging_steps=options.optimizer_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
        for row in read_rows(options.train)
    ]
    return GRPOTrainer(
        model=load(options),
        reward_funcs=exact_line,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        callbacks=[stopwatch],
    )


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, rows: list[Row], max_new_tokens: int, greedy: bool) -> float:
    """Share of held-out rows whose response is the answer."""
    model.eval()
    correct = 0
    for start in range(0, len(rows), 128):
        part = rows[start : start + 128]
        chats = [[{"role": "user", "content": row["prompt"]}] for row in part]
        inputs = tokenizer.apply_chat_template(
            chats,
            add_generation_prompt=True,
            return_tensors="pt",
            padding=True,
            return_dict=True,
        )
        sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        correct += sum(text.strip() == row["answer"] for text, row in zip(texts, part, strict=True))
    return correct / len(rows)


def evaluate(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, float]:
    rows = read_rows(options.val)[: options.val_rows]
    if not rows:
        return {}
    torch.manual_seed(options.seed)
    return {
        f"val_{name}": accuracy(model, tokenizer, rows, options.max_new_tokens, greedy)
        for name, greedy in (("greedy", True), ("sampled", False))
    }


def train(options: argparse.Namespace) -> dict[str, Any]:
    """The report of rank 0; an empty one on the others."""
    stopwatch = Stopwatch(options.warmup_steps * options.optimizer_steps)
    trainer = make_trainer(options, stopwatch)
    trainer.train()
    accelerator = trainer.accelerator
    cpu_s = float(accelerator.reduce(torch.tensor(stopwatch.cpu_s, dtype=torch.float64), reduction="sum"))
    if not accelerator.is_main_process:
        return {}
    model = accelerator.unwrap_model(trainer.model)
    if options.save:
        model.save_pretrained(options.save)
        trainer.processing_class.save_pretrained(options.save)
    samples = (options.steps - options.warmup_steps) * options.num_prompts * options.group_size
    lengths = stopwatch.lengths[options.warmup_steps :]
    return {
        "samples_per_s": samples / stopwatch.wall_s,
        "samples_per_cpu_s": samples / cpu_s,
        "mean_response_tokens": sum(lengths) / max(1, len(lengths)),
        "wall_s": stopwatch.wall_s,
        "cpu_s": cpu_s,
        "processes": accelerator.num_processes,
        "threads": options.threads,
        "continuous_batching": options.continuous_batching,
        **evaluate(model, trainer.processing_class, options),
    }


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    random.seed(options.seed)
    if options.steps:
        report = train(options)
    else:
        model = load(options)
        report = evaluate(model, AutoTokenizer.from_pretrained(options.model, padding_side="left"), options)
    if report:
        print(json.dumps(report), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
