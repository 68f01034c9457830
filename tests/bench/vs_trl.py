"""GRPO on digit sorting: hpcrl against TRL's GRPOTrainer on the same model, prompts, lengths, batch, optimizer steps,
learning rate, clipping and cores.

    python -m tests.bench.vs_trl --setting short|long [--model FOLDER] [--steps N] [--seeds 0 1 2]

short: 64 prompts x 8 answers of about 12 tokens, 119k parameters. It learns, so accuracies can be compared.
long: 16 prompts x 8 answers of geometric length, at most 256 tokens, 4 layers of 256. The model is random: no answer is
right, advantages are 0, the weights stay as they are, so both sides decode and train on the same distribution.

TRL runs in .venv-trl (tests/bench/trl/setup.sh) as two single-threaded processes under torchrun. Both sides have the
same two cores and take turns, once per seed. Samples per second are counted after the warm-up steps, start-up and
evaluation left out; samples per CPU-second, over all processes of a side, say what a loaded machine cannot. One program
judges the final models of both. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from hpcrl.config import TinyModel
from hpcrl.data.tasks import make_task
from hpcrl.metrics.log import read_metrics
from tests.bench.machine import tell

ROOT = Path(__file__).resolve().parents[2]
TRL_BIN = ROOT / ".venv-trl" / "bin"
TRL_PROGRAM = ROOT / "tests" / "bench" / "trl" / "run_trl.py"
CORES = 2
LIMIT_S = 3600


@dataclass(frozen=True)
class Setting:
    """What both sides are given."""

    num_prompts: int
    group_size: int
    max_new_tokens: int
    optimizer_steps: int
    lr: float
    steps: int
    warmup_steps: int
    val_rows: int
    trl_options: tuple[str, ...] = ()  # what makes TRL faster in this setting


# On one core, samples per CPU-second: short 490 plain, 132 with this engine; long 4.2 plain, 5.6 with it.
PAGED = {"page_size": 32, "num_blocks": 2048, "max_batch_tokens": 2048, "max_requests_per_batch": 128}

SETTINGS = {
    "short": Setting(64, 8, 24, optimizer_steps=4, lr=3e-4, steps=14, warmup_steps=4, val_rows=256),
    "long": Setting(
        16,
        8,
        256,
        optimizer_steps=4,
        lr=3e-4,
        steps=3,
        warmup_steps=1,
        val_rows=0,
        trl_options=("--continuous-batching", json.dumps(PAGED)),
    ),
}
LONG_MODEL = TinyModel(
    hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4, intermediate_size=768, tie_word_embeddings=False
)
LONG_MEAN_TOKENS = 64


@dataclass(frozen=True)
class Inputs:
    """Files that both sides read."""

    model: Path
    train: Path
    val: Path


def write_rows(folder: Path) -> tuple[Path, Path]:
    """jsonl files of prompts and answers; the held-out ones share no content with the others."""
    paths = []
    for split, size in (("train", 16384), ("val", 256)):
        task = make_task("task:sort_digits", {}, size, seed=0, split=split)
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(task.row(i)) + "\n" for i in range(size)))
        paths.append(path)
    return paths[0], paths[1]


def make_long_model(folder: Path) -> None:
    """A random model whose probability to end is about 1 / LONG_MEAN_TOKENS at every token.

    Random weights give near-uniform logits. The output row of the end token is fitted so that its logit lies
    log(LONG_MEAN_TOKENS - 1) below the log-sum-exp of the others, over hidden states of random tokens.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from hpcrl.engines.tiny import make_tiny_model

    logging.disable_progress_bar()
    make_tiny_model(LONG_MODEL, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    end = model.generation_config.eos_token_id
    tokens = torch.randint(LONG_MODEL.vocab_size, (32, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state.flatten(0, 1)
        logits = model.lm_head(hidden)
        logits[:, end] = -torch.inf
        target = logits.logsumexp(-1) - torch.tensor(LONG_MEAN_TOKENS - 1.0).log()
        model.lm_head.weight[end] = torch.linalg.lstsq(hidden, target[:, None]).solution[:, 0]
    model.save_pretrained(folder)


def warm_start(folder: Path) -> Path:
    """The supervised warm-up of the demonstration; returns its model."""
    launch(["+experiment=demo_sft"], folder)
    return folder / "hf"


def launch(overrides: Sequence[str], run_dir: Path, warmup_steps: int = 0) -> float:
    """Run hpcrl to its end; returns the CPU-seconds of all its processes between the rows of the warm-up and the last
    step. RuntimeError holds the end of its output."""
    log = run_dir.with_suffix(".log")
    command = [sys.executable, "-m", "hpcrl.launch", *overrides, f"run_dir={run_dir}"]
    with open(log, "w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    seen, begin, end = 0, 0.0, 0.0
    try:
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02 if warmup_steps else 1.0)  # fine steps only where time between rows is measured
            if (rows := len(read_metrics(run_dir))) > seen:
                seen, end = rows, cpu_seconds(process.pid)
                begin = end if rows <= warmup_steps + 1 else begin  # the first row is step 0
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"hpcrl ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return end - begin


def cpu_seconds(pid: int) -> float:
    """Of a process and its descendants so far."""
    total = 0.0
    for process in (root := psutil.Process(pid), *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def run_hpcrl(setting: Setting, inputs: Inputs, seed: int, run_dir: Path) -> dict[str, Any]:
    """Samples per second and mean response length from the run's metrics, accuracy of its exported model."""
    cpu_s = launch(
        [
            "pipeline=rlvr",
            "algorithm=grpo",
            "layout=colocated",
            f"seed={seed}",
            f"max_steps={setting.steps}",
            "eval_every=0",
            "save_every=0",
            f"model.path={inputs.model}",
            f"data.train={inputs.train}",
            f"rollout.num_prompts={setting.num_prompts}",
            f"rollout.group_size={setting.group_size}",
            f"rollout.max_new_tokens={setting.max_new_tokens}",
            "reward.default.name=exact_match",
            f"algorithm.num_mini_batches={setting.optimizer_steps}",
            "algorithm.pg_clip_low=0.2",
            "algorithm.pg_clip_high=0.28",
            f"trainer.lr={setting.lr}",
        ],
        run_dir,
        setting.warmup_steps,
    )
    rows = [row for row in read_metrics(run_dir) if row["step"] > setting.warmup_steps]
    samples = len(rows) * setting.num_prompts * setting.group_size
    return {
        "samples_per_s": samples / sum(row["time/step_total"] for row in rows),
        "samples_per_cpu_s": samples / cpu_s,
        "mean_response_tokens": statistics.mean(row["token/response_length/mean"] for row in rows),
        **(judge(setting, replace(inputs, model=run_dir / "hf"), seed) if setting.val_rows else {}),
    }


def run_trl(setting: Setting, inputs: Inputs, seed: int) -> dict[str, Any]:
    return trl_program(
        setting,
        inputs,
        seed,
        setting.steps,
        [str(TRL_BIN / "torchrun"), "--standalone", "--nproc-per-node", str(CORES)],
    )


def judge(setting: Setting, inputs: Inputs, seed: int) -> dict[str, Any]:
    """Held-out greedy and sampled accuracy of a model folder, by TRL's program for either side."""
    return trl_program(setting, inputs, seed, 0, [str(TRL_BIN / "python")])


def trl_program(setting: Setting, inputs: Inputs, seed: int, steps: int, command: Sequence[str]) -> dict[str, Any]:
    options = {
        "model": inputs.model,
        "train": inputs.train,
        "val": inputs.val,
        "steps": steps,
        "warmup-steps": setting.warmup_steps,
        "num-prompts": setting.num_prompts,
        "group-size": setting.group_size,
        "max-new-tokens": setting.max_new_tokens,
        "optimizer-steps": setting.optimizer_steps,
        "lr": setting.lr,
        "seed": seed,
        "val-rows": setting.val_rows,
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [*command, str(TRL_PROGRAM), *arguments, *setting.trl_options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"TRL ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"')))


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median speed over the seeds, every accuracy."""
    keys = ("samples_per_s", "samples_per_cpu_s", "mean_response_tokens")
    medians = {key: round(statistics.median(run[key] for run in runs), 2) for key in keys}
    accuracies = {key: [round(run[key], 3) for run in runs] for key in runs[0] if key.startswith("val_")}
    return medians | accuracies


def compare(setting: Setting, inputs: Inputs, seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    ours, theirs = [], []
    for seed in seeds:
        ours.append(run_hpcrl(setting, inputs, seed, folder / f"hpcrl_{seed}"))
        theirs.append(run_trl(setting, inputs, seed))
    ratios = {
        f"{name}ratio": round(statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True)), 2)
        for name, key in (("", "samples_per_s"), ("cpu_", "samples_per_cpu_s"))
    }
    return {"hpcrl": summary(ours), "trl": summary(theirs)} | ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=list(SETTINGS), default="short")
    parser.add_argument("--model", type=Path, help="warm start of the short setting; default: train one")
    parser.add_argument("--steps", type=int, help="rollout batches of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    report: dict[str, Any] = {"bench": "vs_trl", "setting": options.setting}
    if not TRL_BIN.exists():
        print(json.dumps(report | {"skipped": "no .venv-trl: run tests/bench/trl/setup.sh"}))
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # inherited by both sides
    setting = SETTINGS[options.setting]
    if options.steps:
        setting = replace(setting, steps=options.steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.setting == "long":
            model = folder / "long"
            make_long_model(model)
        else:
            model = options.model.resolve() if options.model else warm_start(folder / "sft")
        report |= compare(setting, Inputs(model, *write_rows(folder)), options.seeds, folder)
    tell(report | {"seeds": options.seeds})


if __name__ == "__main__":
    main()
