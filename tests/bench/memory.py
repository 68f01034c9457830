"""Peak memory of GRPO in one process: hpcrl against TRL's GRPOTrainer on the same model, rows and sizes.

    python -m tests.bench.memory [--size 0.5b|1.5b] [--dtype float32|bfloat16] [--without-trl] [--limit-gib 16]

The shapes of Qwen2.5 with seeded random weights and a small tokenizer. Two prompts x 4 answers of 48 tokens, one
optimizer step a batch, on two threads; TRL in .venv-trl (tests/bench/trl/setup.sh), in fp32 only.

One JSON line. `peak_gib`: the most that all processes of a side had resident together, sampled every 50 ms, with what
they share counted in each (hpcrl: launcher, agent, rank, reward worker); `rank_gib`: of the largest process, by the
kernel (VmHWM); for hpcrl also that of each phase in the last step, and of the plan. A side that needs more than
--limit-gib, or leaves the machine less than 1 GiB, is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.metrics.log import read_metrics
from tests.bench.machine import tell
from tests.bench.vs_trl import ROOT, TRL_BIN, TRL_PROGRAM

SIZES = {
    "0.5b": TinyModel(
        vocab_size=151936, hidden_size=896, num_layers=24, num_heads=14, num_kv_heads=2, intermediate_size=4864
    ),
    "1.5b": TinyModel(
        vocab_size=151936, hidden_size=1536, num_layers=28, num_heads=12, num_kv_heads=2, intermediate_size=8960
    ),
    "tiny": TinyModel(),
}
PROMPT = "A baker sells {} loaves on Monday and half as many on Tuesday. How many loaves does the baker sell in total?"
NUM_PROMPTS, GROUP_SIZE, NEW_TOKENS, STEPS, THREADS = 2, 4, 48, 2, 2
SAMPLE_S = 0.05
LEFT_BYTES = 1 << 30
LIMIT_S = 3000


def watch(command: Sequence[str], log: Path, limit_bytes: float) -> dict[str, float]:
    """Peak memory of a program and its children, GiB. RuntimeError if it fails or passes the limit."""
    environ = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    total_peak, rank_peak, deadline, ended = 0, 0, time.monotonic() + LIMIT_S, ""
    try:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            total = 0
            for each in [root, *_children(root)]:
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    total += each.memory_info().rss
                    rank_peak = max(rank_peak, high_water(each.pid))
            total_peak = max(total_peak, total)
            if total > limit_bytes or psutil.virtual_memory().available < LEFT_BYTES or time.monotonic() > deadline:
                ended = f"ended by this bench at {total / 2**30:.1f} GiB"
                break
            time.sleep(SAMPLE_S)
    finally:
        for each in [*_children(psutil.Process()), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
    if ended or process.returncode:
        raise RuntimeError(f"{command[0]}: {ended or process.returncode}\n{log.read_text()[-3000:]}")
    return {"peak_gib": round(total_peak / 2**30, 2), "rank_gib": round(rank_peak / 2**30, 2)}


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def high_water(pid: int) -> int:
    """The most memory that a process had resident since its start or since it reset this figure, bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found is not None else 0


def run_hpcrl(model: Path, rows: Path, dtype: str, folder: Path, limit_bytes: float) -> dict[str, Any]:
    """Peaks of a run in one process, of its phases, and by the plan."""
    run_dir, log = folder / "run", folder / "hpcrl.log"
    words = {
        "pipeline": "rlvr",
        "algorithm": "grpo",
        "layout": "single",
        "run_dir": run_dir,
        "model.path": model,
        "model.dtype": dtype,
        "trainer.param_dtype": dtype,
        "generator.dtype": dtype,
        "generator.max_num_seqs": NUM_PROMPTS * GROUP_SIZE,
        "cluster.threads_per_rank": THREADS,
        "data.train": rows,
        "data.max_prompt_tokens": 128,
        "rollout.num_prompts": NUM_PROMPTS,
        "rollout.group_size": GROUP_SIZE,
        "rollout.max_new_tokens": NEW_TOKENS,
        "rollout.save_rollouts": "false",
        "reward.default.name": "exact_match",
        "max_steps": STEPS,
        "eval_every": 0,
        "save_every": 0,
    }
    command = [sys.executable, "-m", "hpcrl.launch", *(f"{key}={value}" for key, value in words.items())]
    peaks: dict[str, Any] = watch(command, log, limit_bytes)
    last = read_metrics(run_dir)[-1]
    phases = {name.split("/")[1]: round(value or 0.0, 2) for name, value in last.items() if "peak_gib" in name}
    planned = re.search(r"^memory .*?: ([\d.]+ [GM]iB) at most", log.read_text(), re.MULTILINE)
    return peaks | {
        "phases_gib": phases,
        "plan": planned[1] if planned else None,
        "step_s": round(last["time/step_total"] or 0.0, 1),
        "prompt_tokens": last["token/prompt_length/mean"],
        "response_tokens": last["token/response_length/mean"],
    }


def run_trl(model: Path, rows: Path, folder: Path, limit_bytes: float) -> dict[str, Any]:
    options = {
        "model": model,
        "train": rows,
        "val": rows,
        "val-rows": 0,
        "steps": STEPS,
        "warmup-steps": 1,
        "num-prompts": NUM_PROMPTS,
        "group-size": GROUP_SIZE,
        "max-new-tokens": NEW_TOKENS,
        "optimizer-steps": 1,
        "threads": THREADS,
        "lr": 1e-6,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    log = folder / "trl.log"
    peaks: dict[str, Any] = watch([str(TRL_BIN / "python"), str(TRL_PROGRAM), *words], log, limit_bytes)
    report = json.loads(next(line for line in reversed(log.read_text().splitlines()) if line.startswith('{"')))
    seconds = report["wall_s"] / (STEPS - 1)
    return peaks | {"step_s": round(seconds, 1), "response_tokens": report["mean_response_tokens"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="0.5b")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--limit-gib", type=float, default=16.0)
    options = parser.parse_args()
    report: dict[str, Any] = {"bench": "memory", "size": options.size, "dtype": options.dtype, "threads": THREADS}
    with tempfile.TemporaryDirectory() as name:
        folder, limit = Path(name), options.limit_gib * 2**30
        make_tiny_model(SIZES[options.size], folder / "model")
        rows = folder / "rows.jsonl"
        lines = [json.dumps({"prompt": PROMPT.format(i), "answer": str(3 * i // 2)}) for i in range(20, 84, 2)]
        rows.write_text("\n".join(lines) + "\n")
        report["hpcrl"] = run_hpcrl(folder / "model", rows, options.dtype, folder, limit)
        if not options.without_trl and TRL_BIN.exists():
            report["trl"] = run_trl(folder / "model", rows, folder, limit)
            report["ratio"] = round(report["hpcrl"]["peak_gib"] / report["trl"]["peak_gib"], 3)
    tell(report)


if __name__ == "__main__":
    main()
