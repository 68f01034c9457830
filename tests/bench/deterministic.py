"""What deterministic=true costs: the demonstration's reinforcement learning without it and with it, alternately.

    python -m tests.bench.deterministic [--model FOLDER] [--steps N] [--repeats N]

One JSON line: samples per second and per CPU-second of all processes after the warm-up steps (medians over the turns),
mean seconds of a step and its parts, and `cost`: seconds and CPU-seconds per sample with it, divided by those without.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean, median

from hpcrl.metrics.log import read_metrics
from tests.bench.machine import tell
from tests.bench.vs_trl import launch, warm_start

WARMUP_STEPS = 3
PARTS = ("time/step_generate", "time/old_log_probs", "time/step_train", "time/step_total")


def measure(model: Path, run_dir: Path, steps: int, deterministic: bool) -> dict[str, float]:
    """Rates and mean seconds of the parts of a step."""
    words = ["+experiment=demo", f"model.path={model}", f"max_steps={steps}", "eval_every=0", "save_every=0"]
    cpu_s = launch([*words, f"deterministic={str(deterministic).lower()}"], run_dir, WARMUP_STEPS)
    rows = [row for row in read_metrics(run_dir) if row["step"] > WARMUP_STEPS]
    samples = sum(row["system/samples"] for row in rows)
    seconds = {name: mean(row[name] for row in rows) for name in PARTS}
    return {
        "samples_per_s": samples / len(rows) / seconds["time/step_total"],
        "samples_per_cpu_s": samples / cpu_s,
    } | seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="warm start; default: train one")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"default": [], "deterministic": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model.resolve() if options.model else warm_start(folder / "sft")
        for turn in range(options.repeats):
            for mode, found in runs.items():
                found.append(measure(model, folder / f"{mode}_{turn}", options.steps, mode == "deterministic"))
    medians = {mode: {key: median(run[key] for run in found) for key in found[0]} for mode, found in runs.items()}
    cost = {
        unit: median(a[key] / b[key] for a, b in zip(runs["default"], runs["deterministic"], strict=True))
        for unit, key in (("wall", "samples_per_s"), ("cpu", "samples_per_cpu_s"))
    }
    report = {"bench": "deterministic"} | {m: {k: round(v, 4) for k, v in s.items()} for m, s in medians.items()}
    report |= {"cost": {unit: round(value, 2) for unit, value in cost.items()}}
    tell(report)


if __name__ == "__main__":
    main()
