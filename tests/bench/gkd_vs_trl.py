"""GKD with the whole vocabulary on given answers of a student: hpcrl's engines against TRL's GKDTrainer and
DistillationTrainer on the same models, answers, batch and optimizer.

    python -m tests.bench.gkd_vs_trl [--group 1 4] [--steps N] [--vocab N] [--beta X]
        [--trainers NAMES] [--micro-batches SIZES]

Prompts of 128 to 256 tokens, answers of 32 to 256, lengths uniform, random words. The student has 4 layers of 256, the
teacher 4 of 512 (fp32). A group is a number of answers to one prompt, whose prompt hpcrl computes once. Nothing is
generated: a step is the packing of the answers into a batch, the teacher's pass, the student's forward and backward
pass with the divergence, and the optimizer. A trained token is a token of an answer.

Each side is one process with one thread; they take turns. TRL runs with micro-batches of 8 answers and of one, which
has no padding; the ratios are to the faster of both. CPU-seconds after the warm-up steps. One JSON line per group size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bench.given_rows import LR, Words, make_model, rounded, run_trl, write_jsonl
from tests.bench.machine import tell
from tests.bench.vs_trl import LIMIT_S, ROOT, TRL_BIN

BATCH, WARM_STEPS = 8, 1
PROMPT, ANSWER = (128, 256), (32, 256)
TEACHER = {"hidden_size": 512, "intermediate_size": 1536, "seed": 1}
TRAINERS, MICRO_BATCHES = ("gkd", "distillation"), (8, 1)
RATE = "trained_tokens_per_cpu_s"


def train(folder: Path, steps: int, beta: float) -> dict[str, float]:
    """hpcrl's turn, in its own process, with folder/student, folder/teacher and folder/rows.jsonl."""
    from hpcrl.algorithms.factory import make_algorithm
    from hpcrl.algorithms.token_losses import fill_weights
    from hpcrl.config import load
    from hpcrl.engines.train.fsdp2.engine import make
    from hpcrl.engines.train.teacher_head import read_teacher_head
    from hpcrl.rollout.batch import Norms, batch_from_samples
    from hpcrl.rollout.types import FinishReason, Sample
    from tests.engines.worlds import process_group

    words = ["pipeline=distill", f"model.path={folder / 'student'}", f"teacher.path={folder / 'teacher'}"]
    words += ["teacher.form=full", f"teacher.beta={beta}", "rollout.group_size=1", f"trainer.lr={LR}"]
    config = load([*words, "data.train=task:sort_digits", "cluster.device=cpu"])
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    objective = make_algorithm(config).objective
    objective.teacher_head = read_teacher_head(folder / "teacher", torch.float32)

    def sample(number: int, prompt: list[int], answer: list[int]) -> Sample:
        ids = np.array(prompt + answer, np.int32)
        zeros = np.zeros(len(ids), np.float32)
        mask = np.arange(len(ids)) >= len(prompt)
        empty = {"gen_logprobs": zeros, "versions": zeros.astype(int), "turn_ids": zeros.astype(int)}
        return Sample(number << 24, FinishReason.STOP, token_ids=ids, loss_mask=mask, **empty)

    trained = 0
    with process_group(0, 1, str(folder / "rendezvous")):
        student = make(config, folder / "student", steps, True)
        teacher = make(config.of_teacher(), folder / "teacher", 1, False)
        for step in range(steps):
            if step == WARM_STEPS:
                trained, begun = 0, time.process_time()
            drawn = rows[step * BATCH : (step + 1) * BATCH]
            samples = [sample(n, row["prompt_ids"], row["answer_ids"]) for n, row in enumerate(drawn)]
            batch = batch_from_samples(samples, list(range(BATCH)))
            fill_weights(config, batch, {})
            batch.advantages = torch.zeros(batch.num_tokens)  # of weight 0
            num_tokens = int(batch.loss_mask.sum())
            trained += num_tokens
            everything = [list(range(BATCH))]  # fewer tokens than trainer.max_tokens_per_micro_batch
            batch.teacher_states = teacher.final_states(batch, everything)
            stats = student.train_step(batch, everything, objective, Norms(float(num_tokens), float(BATCH)))
        cpu_s, timed = time.process_time() - begun, steps - WARM_STEPS
    loss = stats["distill/divergence"]
    return {
        RATE: trained / cpu_s,
        "cpu_s_per_step": cpu_s / timed,
        "trained_tokens_per_step": trained / timed,
        "loss": loss.total / loss.count,
    }


def compare(
    group: int, steps: int, vocab: int, beta: float, trainers: Sequence[str], sizes: Sequence[int], folder: Path
) -> dict[str, Any]:
    student = make_model(folder / "student", vocab_size=vocab)
    teacher = make_model(folder / "teacher", vocab_size=vocab, **TEACHER)
    words = Words(student)

    def ids(text: str) -> list[int]:
        found: list[int] = words.tokenizer(text)["input_ids"]
        return found

    rows = []
    for number in range(steps * BATCH):
        if number % group == 0:
            prompt = ids(words.asked(words.text(*PROMPT)))
        rows.append({"prompt_ids": prompt, "answer_ids": ids(words.text(*ANSWER))})
    given = write_jsonl(folder / "rows.jsonl", rows)
    options = {"steps": steps, "warmup-steps": WARM_STEPS, "batch": BATCH, "beta": beta}
    command = [sys.executable, "-m", "tests.bench.gkd_vs_trl", "--train", str(folder), "--steps", str(steps)]
    done = subprocess.run(
        [*command, "--beta", str(beta)], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"hpcrl ended with {done.returncode}:\n{done.stderr[-3000:]}")
    ours = json.loads(done.stdout.splitlines()[-1])
    options |= {"model": student, "teacher": teacher, "rows": given}
    theirs = {name: [run_trl(name, {**options, "micro-batch": size}) for size in sizes] for name in trainers}
    best = {name: max(found, key=lambda report: report[RATE]) for name, found in theirs.items()}
    return {
        "prompt_tokens": PROMPT,
        "answer_tokens": ANSWER,
        "vocab": vocab,
        "beta": beta,
        "hpcrl": rounded(ours),
        **{
            f"trl_{name}_micro_batch_{size}": rounded(report)
            for name, found in theirs.items()
            for size, report in zip(sizes, found, strict=True)
        },
        **{f"cpu_ratio_{name}": round(ours[RATE] / report[RATE], 2) for name, report in best.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, nargs="+", default=[1, 4], help=f"divides {BATCH}")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=TRAINERS, help="TRL's")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES, help="TRL's")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.train:
        torch.set_num_threads(1)
        print(json.dumps(train(options.train, options.steps, options.beta)))
        return
    if not TRL_BIN.exists():
        print(json.dumps({"bench": "gkd_vs_trl", "skipped": "no .venv-trl: run tests/bench/trl/setup.sh"}))
        return
    for group in options.group:
        with tempfile.TemporaryDirectory() as name:
            given = options.trainers, options.micro_batches, Path(name)
            found = compare(group, options.steps, options.vocab, options.beta, *given)
            tell({"bench": "gkd_vs_trl", "group": group, **found})


if __name__ == "__main__":
    main()
