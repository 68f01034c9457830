"""DPO on pairs with long prompts: hpcrl against TRL's DPOTrainer on the same model, pairs, batch and optimizer.

    python -m tests.bench.pairs_vs_trl [--setting summary chat] [--steps N] [--repeats N]

summary: prompts of 128 to 512 tokens, answers of 24 to 48, the limits of TL;DR's preferences (arXiv 2009.01325; the
distribution within them is uniform). chat: prompts of 64 to 256 tokens, answers of 64 to 384. The model has 4 layers of
256 (3.7M parameters, fp32); a reference of the same size runs in every step on both sides. The loss is the sigmoid.

Each side is one process with one thread; hpcrl's also has its launcher. Both take turns. TRL runs with micro-batches of
8 pairs, its default, and of one pair, which pads least; the ratio is to the faster one. CPU-seconds of all processes of
a side after the warm-up steps, without start and tokenisation of TRL's rows; hpcrl tokenises in every step. A trained
token is a token of an answer. `tokens_ratio`: tokens of both sequences of the pairs to those with prompts counted once,
what sharing prompts can gain over sequences without padding. Prints one JSON line per setting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from hpcrl.data import epoch_order
from hpcrl.metrics.log import read_metrics
from tests.bench.given_rows import LR, Words, make_model, rounded, run_trl, write_jsonl
from tests.bench.machine import tell
from tests.bench.vs_trl import TRL_BIN, launch

BATCH, BETA, WARM_STEPS = 16, 0.1, 2
MICRO_BATCHES = (8, 1)
SETTINGS = {"summary": ((128, 512), (24, 48)), "chat": ((64, 256), (64, 384))}


def run_hpcrl(model: Path, rows: Path, answer_tokens: list[int], steps: int, run_dir: Path) -> dict[str, float]:
    words = ["pipeline=dpo", "layout=single", f"model.path={model}", f"data.train={rows}", f"dpo.batch_size={BATCH}"]
    words += [f"dpo.beta={BETA}", f"trainer.lr={LR}", f"max_steps={steps}", "save_every=0", "eval_every=0"]
    cpu_s = launch([*words, "cluster.device=cpu"], run_dir, WARM_STEPS - 1)  # there is no row of step 0
    drawn = epoch_order(0, "sft", 0, len(answer_tokens))[WARM_STEPS * BATCH : steps * BATCH]
    trained, timed = sum(answer_tokens[row] for row in drawn), steps - WARM_STEPS
    return {
        "trained_tokens_per_cpu_s": trained / cpu_s,
        "cpu_s_per_step": cpu_s / timed,
        "trained_tokens_per_step": trained / timed,
        "loss": read_metrics(run_dir)[-1]["loss"],
    }


def compare(setting: str, steps: int, repeats: int, folder: Path) -> dict[str, Any]:
    prompts, answers = SETTINGS[setting]
    model = make_model(folder / "model")
    words = Words(model)
    rows = [
        {"prompt": words.text(*prompts), "chosen": words.text(*answers), "rejected": words.text(*answers)}
        for _ in range(steps * BATCH)
    ]
    given = write_jsonl(folder / "rows.jsonl", rows)
    rendered = write_jsonl(folder / "trl.jsonl", [{**row, "prompt": words.asked(row["prompt"])} for row in rows])
    answer_tokens = [2 + words.count(row["chosen"]) + words.count(row["rejected"]) for row in rows]  # 2: the ends
    asked = [words.count(words.asked(row["prompt"])) for row in rows]
    options = {"model": model, "rows": rendered, "steps": steps, "warmup-steps": WARM_STEPS, "batch": BATCH}
    ours: list[dict[str, float]] = []
    theirs: dict[int, list[dict[str, float]]] = {size: [] for size in MICRO_BATCHES}
    for turn in range(repeats):
        ours.append(run_hpcrl(model, given, answer_tokens, steps, folder / f"run_{turn}"))
        for size, found in theirs.items():
            found.append(run_trl("dpo", {**options, "micro-batch": size, "beta": BETA}))
    rate = "trained_tokens_per_cpu_s"
    ratios = {
        size: statistics.median(a[rate] / b[rate] for a, b in zip(ours, theirs[size], strict=True)) for size in theirs
    }
    return {
        "prompt_tokens": prompts,
        "answer_tokens": answers,
        "pairs_per_step": BATCH,
        "tokens_ratio": round(1 + sum(asked) / (sum(asked) + sum(answer_tokens)), 2),
        "hpcrl": rounded(ours[-1]),
        **{f"trl_micro_batch_{size}": rounded(found[-1]) for size, found in theirs.items()},
        "cpu_ratios": {str(size): round(ratio, 2) for size, ratio in ratios.items()},
        "cpu_ratio": round(min(ratios.values()), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    if not TRL_BIN.exists():
        skipped = "no .venv-trl: run tests/bench/trl/setup.sh"
        print(json.dumps({"bench": "pairs_vs_trl", "skipped": skipped}))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    for setting in options.setting:
        with tempfile.TemporaryDirectory() as name:
            found = compare(setting, options.steps, options.repeats, Path(name))
            tell({"bench": "pairs_vs_trl", "setting": setting, **found})


if __name__ == "__main__":
    main()
