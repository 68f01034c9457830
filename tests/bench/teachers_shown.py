"""The tables and plots of tests.bench.teachers, from the lines of its runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.learning import Line, ends, grouped, markdown, mean_curve, spread

MARGIN = 0.05  # how far below the teacher a student is to come
SHOWN = (10, 20, 30, 60, 80)
STUDENTS = {
    "grpo": "GRPO",
    "full_0": "whole vocabulary, beta 0",
    "full_0.5": "whole vocabulary, beta .5",
    "full_1": "whole vocabulary, beta 1",
    "top_k_0": "top-k 8, beta 0",
}
SCORED = {
    "on_own_pairs": "the first model, KL .1",
    "scored": "the larger model, no KL",
    "scored_kl": "the larger model, KL .15",
}
MODELS = {"own_pairs_model": "reward model on own pairs", "reward_model": "larger, on own and made-up pairs"}


def tables(lines: Sequence[Line]) -> str:
    """Markdown, one table per question; of several seeds the mean, with the lowest and the highest."""
    found = {name: runs for (name,), runs in grouped(lines, "run").items()}
    texts = []
    if "teacher" in found:
        texts += [_students(found)]
    if pairs := {name: found[name] for name in ("dpo", *MODELS) if name in found}:
        texts += [_pairs(pairs)]
    if scored := {name: found[name] for name in SCORED if name in found}:
        texts += [_overoptimised(scored)]
    return "\n\n".join(texts)


def goals(found: dict[str, list[Line]]) -> dict[int, float]:
    """Seed -> the accuracy that the students are to reach, on the seed's prompts."""
    return {_seed(line): line["greedy"]["0"] - MARGIN for line in found["teacher"]}


def crossing(line: Line, level: float) -> int | None:
    """The first validated step whose greedy accuracy is at least `level`."""
    return next((int(step) for step, value in line["greedy"].items() if value >= level), None)


def _students(found: dict[str, list[Line]]) -> str:
    levels = goals(found)
    rows = [["Run", "Seeds", *(f"Greedy after {step}" for step in SHOWN), "Sampled at the end"]]
    rows[0] += [f"Step of the teacher's accuracy - {MARGIN:.2f}, by seed"]
    for name, label in STUDENTS.items():
        if not (runs := sorted((line for line in found.get(name, ()) if _seed(line) in levels), key=_seed)):
            continue
        cells = [spread([line["greedy"][str(step)] for line in runs]) if step <= _last(runs) else "" for step in SHOWN]
        cells += [spread([ends(line, "sampled")[1] for line in runs])]
        crossed = [str(crossing(line, levels[_seed(line)]) or f"over {line['steps']}") for line in runs]
        rows.append([label, ", ".join(str(_seed(line)) for line in runs), *cells, ", ".join(crossed)])
    return markdown(rows)


def _last(runs: Sequence[Line]) -> int:
    """The last step that all runs have."""
    return min(int(line["steps"]) for line in runs)


def _seed(line: Line) -> int:
    return int(line["seed"])


def _pairs(found: dict[str, list[Line]]) -> str:
    rows = [["Run", "Seed", "Before", "After"]]  # of reward models: the share of held-out pairs in order
    for name, runs in found.items():
        for line in sorted(runs, key=_seed):
            curve = line["sampled" if name == "dpo" else "pairs"]
            before = f"{curve['0']:.3f}" if "0" in curve else "-"  # DPO does not validate before its first step
            rows.append(
                [MODELS.get(name, "DPO, sampled accuracy"), str(line["seed"]), before, f"{[*curve.values()][-1]:.3f}"]
            )
    return markdown(rows)


def _overoptimised(found: dict[str, list[Line]]) -> str:
    rows = [["RL on the reward model", "Seed", "Reward, first and last step", "True accuracy, sampled: before", "best"]]
    rows[0] += ["after", "greedy: before, best, after", "KL of a response, last step, nats"]
    for name, runs in found.items():
        for line in sorted(runs, key=_seed):
            reward, sampled, greedy = (ends(line, figure) for figure in ("reward", "sampled", "greedy"))
            best = max(line["sampled"].items(), key=lambda item: item[1])
            cells = [f"{reward[0]:.2f}, {reward[1]:.2f}", f"{sampled[0]:.3f}", f"{best[1]:.3f} (step {best[0]})"]
            cells += [f"{sampled[1]:.3f}", f"{greedy[0]:.3f}, {max(line['greedy'].values()):.3f}, {greedy[1]:.3f}"]
            rows.append([SCORED[name], str(line["seed"]), *cells, f"{_distance(line)[-1] ** 2:.2f}"])
    return markdown(rows)


def _distance(line: Line) -> list[float]:
    """The square root of the KL of a response to the warm start, nats, before each step."""
    return [math.sqrt(max(0.0, line["kl"][step] * line["tokens"][step])) for step in line["kl"]]


def plots(lines: Sequence[Line], folder: Path) -> None:
    """distillation.svg, pairs.svg and overoptimisation.svg, those of which there are runs."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "hpcrl"
    found = {name: runs for (name,), runs in grouped(lines, "run").items()}
    folder.mkdir(parents=True, exist_ok=True)
    if "teacher" in found:
        _plot_students(found, folder / "distillation.svg")
    if "dpo" in found and MODELS.keys() & found:
        _plot_pairs(found, folder / "pairs.svg")
    if SCORED.keys() & found:
        _plot_overoptimised(found, folder / "overoptimisation.svg")


def _draw(axes: Any, runs: list[Line], figure: str, color: str, label: str) -> None:
    """The curve of each seed, and their mean."""
    for line in runs:
        axes.plot([int(step) for step in line[figure]], [*line[figure].values()], color=color, linewidth=0.6, alpha=0.4)
    mean = mean_curve(runs, figure)
    axes.plot([*mean], [*mean.values()], color=color, linewidth=1.6, label=label)


def _save(figure: Any, file: Path, bottom: float = 0.0) -> None:
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(file, metadata={"Date": None})


def _plot_students(found: dict[str, list[Line]], file: Path) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.4))
    for axes, key in zip(panels, ("greedy", "sampled"), strict=True):
        for number, (name, label) in enumerate(STUDENTS.items()):
            if runs := found.get(name):
                _draw(axes, runs, key, f"C{number}", label)
        taught = statistics.mean(line[key]["0"] for line in found["teacher"])
        axes.axhline(taught, color="black", linewidth=0.8, label="the teacher")
        axes.set(xlabel="step of 512 responses", title=f"validation accuracy, {key}")
    panels[0].axhline(
        statistics.mean(goals(found).values()),
        color="black",
        linewidth=0.8,
        linestyle=":",
        label=f"the teacher - {MARGIN:.2f}",
    )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncol=4, fontsize=8)
    _save(figure, file, 0.12)


def _plot_pairs(found: dict[str, list[Line]], file: Path) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8))
    for key, color in (("greedy", "C0"), ("sampled", "C1")):
        _draw(left, found["dpo"], key, color, key)
    left.set(xlabel="step of 64 pairs", title="DPO: validation accuracy")
    left.legend(fontsize=8)
    for number, (name, label) in enumerate(MODELS.items()):
        if runs := found.get(name):
            _draw(right, runs, "pairs", f"C{number + 2}", label)
    right.legend(fontsize=8)
    right.axhline(0.95, color="black", linewidth=0.8, linestyle=":")
    right.set(xlabel="step", title="reward model: accuracy on held-out pairs")
    _save(figure, file)


def _plot_overoptimised(found: dict[str, list[Line]], file: Path) -> None:
    """The proxy and the truth over the distance from the warm start (Gao et al., arXiv 2210.10760)."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 4.2))
    for number, (name, label) in enumerate(SCORED.items()):
        for line in found.get(name, ()):
            places = {int(step) - 1: at for step, at in zip(line["kl"], _distance(line), strict=True)}
            reward = {int(step) - 1: value for step, value in line["reward"].items()}  # of the policy before the step
            truth = {int(step): value for step, value in line["sampled"].items()}
            for axes, curve in ((left, reward), (right, truth)):
                near = sorted((places[step], value) for step, value in curve.items() if step in places)
                axes.plot(*zip(*near, strict=True), ".-", color=f"C{number}", linewidth=1.2, label=label)
    left.set_title("the reward model's mean score", fontsize=10)
    right.set_title("true accuracy, sampled", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("square root of the KL of a response to the warm start, nats")
    shown = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown.keys(), loc="lower center", ncol=2, fontsize=8)
    _save(figure, file, 0.12)
