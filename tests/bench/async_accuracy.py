"""Whether asynchronous training learns as well as synchronous training: the demonstration at staleness 0, 1, 2 and 4.

    python -m tests.bench.async_accuracy --model runs/demo_sft/hf [--runs FOLDER] [--plot FILE]

Four processes each time (`+experiment=rlvr_async`), so that only the lag differs; lag 4 also with the correction that
is the default, with the ratio to the generator in its place, and without both. One
JSON line: validation accuracy of 2,048 prompts at the end, sampled and greedy, per seed, and for every lag the mean of
sync - async over the seeds with its one-sided 90 % upper bound (Student's t on the paired differences). 25 runs take an
hour and more; those that `--runs` already holds, of an earlier call with the same words, are not run again.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path

from hpcrl.metrics.log import read_metrics
from tests.bench.learning import run_folder
from tests.bench.machine import tell
from tests.bench.vs_trl import launch

DEFAULTS = ["~algorithm.correction", "~algorithm.correction_level"]  # without what the recipe sets
VARIANTS = {
    "sync": ["rollout.max_staleness=0", "algorithm.correction=none"],
    "lag_1": ["rollout.max_staleness=1"],
    "lag_2": ["rollout.max_staleness=2"],
    "lag_4": ["rollout.max_staleness=4"],
    "lag_4_defaults": ["rollout.max_staleness=4", *DEFAULTS],
    "lag_4_generator": ["rollout.max_staleness=4", "~algorithm.correction", "algorithm.ratio_to=generator"],
    "lag_4_uncorrected": ["rollout.max_staleness=4", "algorithm.correction=none"],
}
FIGURES = {"sampled": "val/sampled/score/mean", "greedy": "val/score/mean"}
T_90 = {
    1: 3.078,
    2: 1.886,
    3: 1.638,
    4: 1.533,
    5: 1.476,
    6: 1.440,
    7: 1.415,
    8: 1.397,
    9: 1.383,
}  # by degrees of freedom


def train(model: str, variant: str, seed: int, steps: int, folder: Path) -> list[dict[str, float | None]]:
    """The metrics of one run."""
    run_dir = folder / f"{variant}_{seed}"
    if len(rows := read_metrics(run_dir)) == steps + 1:
        return rows
    words = ["+experiment=rlvr_async", f"model.path={model}", f"seed={seed}", f"max_steps={steps}"]
    words += [f"eval_every={steps}", "save_every=0", "eval.num_prompts=2048", *VARIANTS[variant]]
    words += ["rollout.max_generated_groups=20000"]  # the filter rejects nearly all once nearly all answers are right
    launch(words, run_dir)
    return read_metrics(run_dir)


def upper_bound(differences: list[float]) -> float:
    """Of their mean, one-sided 90 %."""
    count = len(differences)
    spread = statistics.stdev(differences) / math.sqrt(count) if count > 1 else math.inf
    return statistics.mean(differences) + T_90.get(count - 1, 1.282) * spread


def summary(runs: dict[str, list[list[dict[str, float | None]]]]) -> dict[str, object]:
    """Everything but the curves."""
    result: dict[str, object] = {"bench": "async_accuracy"}
    ends = {
        variant: {name: [float(rows[-1][key] or 0.0) for rows in seeds] for name, key in FIGURES.items()}
        for variant, seeds in runs.items()
    }
    for variant, seeds in runs.items():
        last = [rows[-1] for rows in seeds]
        shown: dict[str, object] = {name: [round(v, 3) for v in values] for name, values in ends[variant].items()}
        shown["lag_mean"] = round(statistics.mean(float(row["scheduler/staleness/mean"] or 0.0) for row in last), 2)
        steps = [float(row["time/step_total"] or 0.0) for rows in seeds for row in rows[3:]]
        shown["step_s"] = round(statistics.median(steps), 3)
        if variant != "sync" and "sync" in ends:
            for name in FIGURES:
                pairs = zip(ends["sync"][name], ends[variant][name], strict=True)
                lost = [sync - ahead for sync, ahead in pairs]
                shown[f"{name}_lost"] = [round(statistics.mean(lost), 4), round(upper_bound(lost), 4)]
        result[variant] = shown
    return result


def plot(runs: dict[str, list[list[dict[str, float | None]]]], file: Path) -> None:
    """Mean training reward over the seeds, smoothed over five steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for variant, seeds in runs.items():
        steps = list(zip(*seeds, strict=True))[1:]
        means = [statistics.mean(float(row["critic/rewards/mean"] or 0.0) for row in step) for step in steps]
        smooth = [statistics.mean(means[max(0, i - 4) : i + 1]) for i in range(len(means))]
        axes.plot(range(1, len(smooth) + 1), smooth, label=variant.replace("_", " "))
    axes.set_xlabel("step")
    axes.set_ylabel("reward, mean over seeds and 5 steps")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def main() -> int:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--runs", type=Path, help="keep the runs here (default: they are removed)")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if not options.model:
        print("async_accuracy needs --model, such as runs/demo_sft/hf", file=sys.stderr)
        return 0
    runs: dict[str, list[list[dict[str, float | None]]]] = {variant: [] for variant in options.variants}
    with run_folder(options.runs) as folder:
        for seed in options.seeds:
            for variant in options.variants:
                runs[variant].append(train(options.model, variant, seed, options.steps, folder))
                ends = {name: runs[variant][-1][-1][key] for name, key in FIGURES.items()}
                print(f"seed {seed} {variant}: {ends}", file=sys.stderr, flush=True)
    if options.plot:
        plot(runs, options.plot)
    tell(summary(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
