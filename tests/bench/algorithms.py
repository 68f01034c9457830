"""Whether every algorithm of conf/algorithm learns: each on the demonstration's task, from one warm start.

    python -m tests.bench.algorithms --model runs/demo_sft/hf --out FILE [--runs FOLDER] [--only NAMES] [--plot FILE]

Each run has the keys of `+experiment=demo` with its own `algorithm=`, one process, one thread, and the same number of
steps, prompts and responses, and the same learning rate. Groups of equal rewards are replaced in `dapo` alone, where
that is part of the recipe. A KL term of weight 1e-12 changes nothing, and lets the KL to the warm start be measured.
`--out` gets one JSON line per run; runs that it already has are not run again. Prints a table: validation accuracy at
the end, its gain, and KL and entropy of the last step. The recipes for turns (FOR_TURNS) need an environment and are
left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from hpcrl.metrics.log import read_metrics
from tests.bench.learning import (
    Line,
    completed,
    curves,
    ends,
    grouped,
    markdown,
    mean_curve,
    run_folder,
    spread,
)
from tests.bench.machine import machine
from tests.bench.vs_trl import ROOT, launch

FOR_TURNS = {"turn_reinforce", "step_reinforce", "starpo", "gigpo", "turn_ppo"}
RECIPES = sorted({path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml")} - FOR_TURNS)
SEEDS = {name: (0, 1, 2) for name in ("grpo", "ppo", "reinforce_plus_plus", "topr", "gspo")}
OWN = {"ppo": ["critic.lr=5e-4"]}  # as the policy's, which the demonstration sets
FIGURES = {
    "greedy": "val/score/mean",
    "sampled": "val/sampled/score/mean",
    "kl": "critic/kl",
    "entropy": "critic/entropy/mean",
    "reward": "critic/rewards/mean",
    "explained_variance": "critic/explained_variance",
}


def run(seed: int, name: str, model: str, steps: int, eval_every: int, folder: Path) -> Line:
    """The line of one run."""
    run_dir = folder / f"{name}_{seed}"
    if len(read_metrics(run_dir)) != steps + 1:
        words = ["+experiment=demo", f"algorithm={name}", f"model.path={model}", f"seed={seed}", f"max_steps={steps}"]
        words += [f"eval_every={eval_every}", "save_every=0", "eval.num_prompts=1024", "layout=single"]
        words += ["algorithm.kl_loss_coef=1e-12", *OWN.get(name, [])]
        words += [] if name == "dapo" else ["rollout.filter_std=false"]
        launch(words, run_dir)
    seconds = statistics.median(float(row["time/step_total"] or 0.0) for row in read_metrics(run_dir)[3:])
    line = {"algorithm": name, "seed": seed, "steps": steps, "step_s": round(seconds, 3)}
    return {**line, **curves(run_dir, FIGURES), **machine()}


def table(lines: Iterable[Line]) -> str:
    """Markdown, the best sampled accuracy first; several seeds as their mean, with the lowest and the highest."""
    by_name = {name: found for (name,), found in grouped(lines, "algorithm").items()}

    def mean(name: str, figure: str, end: int = 1) -> float:
        return statistics.mean(ends(line, figure)[end] for line in by_name[name])

    rows = [["`algorithm=`", "Seeds", "Greedy", "Sampled", "Gain, greedy", "Gain, sampled", "KL", "Entropy"]]
    for name in sorted(by_name, key=lambda name: -mean(name, "sampled")):
        last = [spread([ends(line, figure)[1] for line in by_name[name]]) for figure in ("greedy", "sampled")]
        gains = [f"{mean(name, figure) - mean(name, figure, 0):.3f}" for figure in ("greedy", "sampled")]
        numbers = [f"{mean(name, figure):.3f}" for figure in ("kl", "entropy")]
        rows.append([f"`{name}`", str(len(by_name[name])), *last, *gains, *numbers])
    return markdown(rows)


def plot(lines: list[Line], file: Path) -> None:
    """Held-out sampled accuracy, KL and entropy by step; means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "hpcrl"
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4.6))
    names = sorted({line["algorithm"] for line in lines})
    colors = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for axes, key, label in zip(
        panels,
        ("sampled", "kl", "entropy"),
        ("validation accuracy, sampled", "KL to the warm start, nats a token", "entropy, nats a token"),
        strict=True,
    ):
        for number, name in enumerate(names):
            means = mean_curve([line for line in lines if line["algorithm"] == name], key)
            color = colors[number % len(colors)]
            axes.plot([*means], [*means.values()], label=name, color=color, linewidth=1.2)
        axes.set_xlabel("step")
        axes.set_title(label, fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncol=6, fontsize=8)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> int:
    """Run what `--out` lacks, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the warm start, such as runs/demo_sft/hf")
    parser.add_argument("--out", type=Path, help="the lines of the runs")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one core each")
    parser.add_argument("--runs", type=Path, help="keep the runs here (default: they are removed)")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if not options.model or not options.out:
        print("algorithms needs --model, such as runs/demo_sft/hf, and --out", file=sys.stderr)
        return 0
    todo = sorted((seed, name) for name in options.only for seed in SEEDS.get(name, (0,)))
    with run_folder(options.runs) as folder:

        def one(seed: int, name: str) -> Line:
            return run(seed, name, options.model, options.steps, options.eval_every, folder)

        lines = completed(options.out, ("seed", "algorithm"), todo, one, options.jobs)
    if options.plot:
        plot(lines, options.plot)
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
