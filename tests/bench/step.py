"""Seconds of a GRPO step from end to end, with the native generator and with vLLM, in turns.

    python -m tests.bench.step [--steps N] [--repeats N] [--layout NAME]

Prints one JSON line. 16 prompts x 8 answers of geometric length, at most 256 tokens, 4 layers of 256 (vs_trl's long
setting; both engines draw answers from the same seeds), in fp32. Of each engine: mean seconds of a step and of its
parts after the warm-up steps, and CPU-seconds of a step over all processes, medians over the turns; `vllm_over_native`:
medians of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median

from hpcrl.metrics.log import read_metrics
from tests.bench.async_live import ANSWERS
from tests.bench.machine import tell
from tests.bench.vs_trl import launch, make_long_model, write_rows

WARMUP_STEPS = 1
ENGINES = ("native", "vllm")
PARTS = {
    "step_s": "time/step_total",
    "generate_s": "time/step_generate",
    "train_s": "time/step_train",
    "publish_s": "time/step_update_weights",
    "response_tokens": "token/response_length/mean",
}


def measure(engine: str, layout: str, model: Path, rows: Path, steps: int, run_dir: Path) -> dict[str, float]:
    """Figures of one run."""
    words = ["pipeline=rlvr", "algorithm=grpo", f"layout={layout}", *ANSWERS.split(), "reward.default.name=exact_match"]
    words += [f"model.path={model}", f"data.train={rows}", "trainer.lr=1e-5", "save_every=0", "eval_every=0"]
    last = WARMUP_STEPS + steps
    cpu_s = launch([*words, f"generator.engine={engine}", f"max_steps={last}"], run_dir, WARMUP_STEPS)
    metrics = [row for row in read_metrics(run_dir) if row["step"] > WARMUP_STEPS]
    return {name: mean(row[key] for row in metrics) for name, key in PARTS.items()} | {"step_cpu_s": cpu_s / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layout", default="colocated")
    options = parser.parse_args()
    report: dict[str, object] = {"bench": "step", "layout": options.layout}
    if find_spec("vllm") is None:
        print(json.dumps(report | {"skipped": "vLLM is not installed"}))
        return
    runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_long_model(folder / "model")
        rows, _ = write_rows(folder)
        for turn in range(options.repeats):
            for engine, found in runs.items():
                run_dir = folder / f"{engine}_{turn}"
                found.append(measure(engine, options.layout, folder / "model", rows, options.steps, run_dir))
    for engine, found in runs.items():
        report[engine] = {key: round(median(run[key] for run in found), 3) for key in found[0]}
    report["vllm_over_native"] = {
        key: round(median(vllm[key] / native[key] for native, vllm in zip(*runs.values(), strict=True)), 2)
        for key in runs["native"][0]
    }
    tell(report)


if __name__ == "__main__":
    main()
