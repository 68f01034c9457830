"""Whether agents learn: four environments, by trajectory and by steps, with GRPO and GiGPO.

    python -m tests.bench.agentic --out FILE [--runs FOLDER] [--only NAMES] [--seeds 0 1 2] [--jobs N] [--plot FILE]

Each environment's warm-start model is trained first (its experiment with `_sft`). Each run then has the keys of the
environment's experiment, one process, one thread, and the steps of ENVIRONMENTS. By steps, the prompt of a turn shows
all earlier turns, so that the model sees what it sees by trajectory. `--out` gets one JSON line per run; runs that it
already has are not run again, nor are runs and warm-ups that `--runs` has. Prints a table: sampled success and return
in validation before and after, with the lowest and the highest of the seeds, and CPU-seconds of all processes of a run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
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
from tests.bench.vs_trl import launch

EVALUATIONS = 3


@dataclass(frozen=True)
class Environment:
    """An experiment, its section NAME of `env.NAME`, and the number of steps of a run."""

    experiment: str
    section: str
    steps: int


ENVIRONMENTS = {
    "frozen_lake": Environment("demo_agentic", "default", 60),
    "sokoban": Environment("demo_sokoban", "default", 45),
    "tools": Environment("demo_tools", "numbers", 60),
    "webshop": Environment("demo_webshop", "shop", 60),
}
FORMS = ("trajectory", "steps")
CREDITS = ("grpo", "gigpo")
FIGURES = {
    "success": "val/score/mean",
    "trained": "critic/score/mean",
    "entropy": "critic/entropy/mean",
    "tokens": "token/response_length/mean",
}


def warm_up(name: str, folder: Path) -> None:
    """Train the warm-start model of an environment if it does not exist."""
    if not (folder / f"{name}_sft" / "hf").exists():
        launch([f"+experiment={ENVIRONMENTS[name].experiment}_sft", "layout=single"], folder / f"{name}_sft")


def run(name: str, form: str, credit: str, seed: int, folder: Path) -> Line:
    """The line of one run."""
    env = ENVIRONMENTS[name]
    run_dir, section = folder / f"{name}_{form}_{credit}_{seed}", f"env.{env.section}"
    words = [f"+experiment={env.experiment}", f"model.path={folder / f'{name}_sft' / 'hf'}", f"seed={seed}"]
    words += [f"max_steps={env.steps}", f"eval_every={env.steps // EVALUATIONS}"]
    words += ["layout=single", "save_every=0", "rollout.save_rollouts=false", f"algorithm.advantage_estimator={credit}"]
    words += [f"{section}.episode={form}"]
    words += [f"{section}.history=100", "data.max_prompt_tokens=1024"] if form == "steps" else []
    line = {"environment": name, "form": form, "credit": credit, "seed": seed, "steps": env.steps}
    if len(read_metrics(run_dir)) != env.steps + 1:
        line["cpu_s"] = round(launch(words, run_dir, warmup_steps=-1))
    domain = name if env.section == "default" else env.section
    return {**line, **curves(run_dir, FIGURES | {"return": f"val/env/{domain}/return"}), **machine()}


def table(lines: Iterable[Line]) -> str:
    """Markdown, in the order of ENVIRONMENTS."""
    rows = [["Environment", "Episodes", "Advantage estimator", "Seeds", "Before", "After", "Least gain"]]
    rows[0] += ["Return before", "After", "Steps", "CPU-seconds"]
    found = grouped(lines, "environment", "form", "credit")
    for name, form, credit in itertools.product(ENVIRONMENTS, FORMS, CREDITS):
        if not (runs := found.get((name, form, credit))):
            continue
        before, after = zip(*(ends(line, "success") for line in runs), strict=True)
        least = min(end - begin for begin, end in zip(before, after, strict=True))
        costs = [line["cpu_s"] for line in runs if "cpu_s" in line]
        cost = str(round(statistics.mean(costs))) if costs else "-"
        returns = [spread(values, 2) for values in zip(*(ends(line, "return") for line in runs), strict=True)]
        numbers = [spread(before, 2), spread(after, 2), f"{least:+.2f}", *returns]
        rows.append([f"`{name}`", form, credit, str(len(runs)), *numbers, str(runs[0]["steps"]), cost])
    return markdown(rows)


def plot(lines: list[Line], file: Path) -> None:
    """A panel for each environment: held-out success by step, of each seed and their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "hpcrl"
    names = [name for name in ENVIRONMENTS if any(line["environment"] == name for line in lines)]
    figure, panels = pyplot.subplots(1, len(names), figsize=(3.4 * len(names), 3.8), squeeze=False)
    colors = dict(zip(itertools.product(CREDITS, FORMS), ("C0", "C2", "C1", "C3"), strict=True))
    for axes, name in zip(panels[0], names, strict=True):
        mine = [line for line in lines if line["environment"] == name]
        for (credit, form), runs in sorted(grouped(mine, "credit", "form").items()):
            color = colors[credit, form]
            for line in runs:
                curve = line["success"]
                axes.plot([int(step) for step in curve], [*curve.values()], color=color, linewidth=0.6, alpha=0.4)
            mean = mean_curve(runs, "success")
            axes.plot([*mean], [*mean.values()], color=color, linewidth=1.6, label=f"{credit}, {form}")
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylim(0, 1)
    panels[0][0].set_ylabel("held-out success, sampled")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncol=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> int:
    """Run what `--out` lacks, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines, one per run; runs that it has are not repeated")
    parser.add_argument("--only", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--credits", nargs="+", choices=CREDITS, default=CREDITS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one core each")
    parser.add_argument("--runs", type=Path, help="keep the runs here (default: they are removed)")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if not options.out:
        print("agentic needs --out", file=sys.stderr)
        return 0
    names = ("seed", "environment", "form", "credit")
    todo = itertools.product(options.seeds, options.only, options.forms, options.credits)
    with run_folder(options.runs) as folder:
        for name in options.only:
            warm_up(name, folder)

        def one(seed: int, name: str, form: str, credit: str) -> Line:
            return run(name, form, credit, seed, folder)

        lines = completed(options.out, names, todo, one, options.jobs)
    if options.plot:
        plot(lines, options.plot)
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
