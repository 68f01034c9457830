"""The TRL side of tests/bench/pairs_vs_trl.py and tests/bench/gkd_vs_trl.py: trainers on rows that are given, run in
.venv-trl on one thread of the CPU: DPOTrainer on pairs, GKDTrainer and DistillationTrainer on answers of a student.

Rows have texts for DPOTrainer, which tokenises them before training, and for the others ids: GKDTrainer takes them by
its collator (with lmbda=0 it generates nothing), DistillationTrainer in place of its generation. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerState
from trl import DistillationConfig, DistillationTrainer, DPOConfig, DPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

Row = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", required=True, choices=["dpo", "gkd", "distillation"])
    parser.add_argument("--model", required=True, help="HF folder with tokenizer")
    parser.add_argument("--teacher", default="", help="HF folder")
    parser.add_argument("--rows", required=True, help="jsonl: prompt, chosen, rejected; or prompt_ids, answer_ids")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps")
    parser.add_argument("--warmup-steps", type=int, default=2, help="steps that are not timed")
    parser.add_argument("--batch", type=int, required=True, help="rows of an optimizer step")
    parser.add_argument("--micro-batch", type=int, required=True, help="rows of a forward pass")
    parser.add_argument("--beta", type=float, required=True)
    parser.add_argument("--lr", type=float, required=True)
    return parser.parse_args()


class Counter(TrainerCallback):
    """CPU seconds and trained tokens from the end of the warm-up to the end of training."""

    def __init__(self, warmup_steps: int):
        self.warmup, self.tokens, self.loss = warmup_steps, 0, 0.0
        self.begin = self.end = (0.0, 0)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.end = time.process_time(), self.tokens
        if state.global_step == self.warmup:
            self.begin = self.end

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.loss = logs.get("loss", self.loss)


def counted(trainer: type, counter: Counter) -> type:
    """The trainer, which counts the tokens of each loss."""

    class Counted(trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **given: Any) -> Any:
            mask = inputs["completion_mask"] if "completion_mask" in inputs else inputs["labels"] != -100
            counter.tokens += int(mask.sum())
            return super().compute_loss(model, inputs, *args, **given)

    return Counted


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What all three trainers are given."""
    return {
        "output_dir": os.environ.get("TMPDIR", "/tmp"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.batch // options.micro_batch,
        "learning_rate": options.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "beta": options.beta,
    }


def make_dpo(options: argparse.Namespace, rows: list[Row], tokenizer: Any, counter: Counter) -> Any:
    return counted(DPOTrainer, counter)(
        model=load(options.model),
        ref_model=load(options.model),
        args=DPOConfig(**settings(options), max_length=None),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[counter],
    )


def make_gkd(options: argparse.Namespace, rows: list[Row], tokenizer: Any, counter: Counter) -> Any:
    def collate(some: list[Row]) -> dict[str, torch.Tensor]:
        ids = [row["prompt_ids"] + row["answer_ids"] for row in some]
        longest = max(map(len, ids))

        def padded(values: list[list[int]], fill: int) -> torch.Tensor:
            return torch.tensor([each + [fill] * (longest - len(each)) for each in values])

        labels = [[-100] * len(row["prompt_ids"]) + row["answer_ids"] for row in some]
        return {
            "input_ids": padded(ids, tokenizer.pad_token_id),
            "attention_mask": padded([[1] * len(each) for each in ids], 0),
            "labels": padded(labels, -100),
        }

    return counted(GKDTrainer, counter)(
        model=load(options.model),
        teacher_model=load(options.teacher),
        args=GKDConfig(**settings(options), lmbda=0.0, temperature=1.0, max_length=None),
        train_dataset=Dataset.from_list(rows),
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=[counter],
    )


def make_distillation(options: argparse.Namespace, rows: list[Row], tokenizer: Any, counter: Counter) -> Any:
    answers: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    for row in rows:
        answers[tuple(row["prompt_ids"])].append(row["answer_ids"])

    class Given(counted(DistillationTrainer, counter)):  # type: ignore[misc]
        def _tokenize_prompts(self, prompts: list[Any]) -> Any:
            return [json.loads(prompt) for prompt in prompts], None, {}

        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
            found = []
            for ids in prompt_ids:
                of_prompt = answers[tuple(ids)]
                of_prompt.append(of_prompt.pop(0))
                found.append(of_prompt[-1])
            return found

    return Given(
        model=load(options.model),
        teacher_model=load(options.teacher),
        args=DistillationConfig(**settings(options), temperature=1.0, max_completion_length=None),
        train_dataset=Dataset.from_list([{"prompt": json.dumps(row["prompt_ids"])} for row in rows]),
        processing_class=tokenizer,
        callbacks=[counter],
    )


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    with open(options.rows, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    counter = Counter(options.warmup_steps)
    make = {"dpo": make_dpo, "gkd": make_gkd, "distillation": make_distillation}[options.trainer]
    trainer = make(options, rows, AutoTokenizer.from_pretrained(options.model), counter)
    trainer.train()
    (begun, before), (ended, after) = counter.begin, counter.end
    steps = options.steps - options.warmup_steps
    report = {
        "trained_tokens_per_cpu_s": (after - before) / (ended - begun),
        "cpu_s_per_step": (ended - begun) / steps,
        "trained_tokens_per_step": (after - before) / steps,
        "loss": counter.loss,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
