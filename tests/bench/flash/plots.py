"""One picture per setting: speed-up along its first axis, a line per value of its second, beside the published one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from tests.bench.flash.scenarios import Scenario


def draw(folder: Path, name: str, scenario: Scenario, points: list[dict[str, Any]]) -> None:
    """Write FOLDER/NAME.svg; a panel per value of the axes that are neither horizontal nor lines."""
    horizontal, line = scenario.axes
    others = [key for key in scenario.plausible if key not in scenario.axes]
    panels = list(dict.fromkeys(tuple(p[key] for key in others) for p in points))
    figure, grid = plt.subplots(
        1, len(panels), figsize=(1.5 + 3.2 * len(panels), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, panel in zip(grid[0], panels, strict=True):
        shown = [p for p in points if tuple(p[key] for key in others) == panel]
        for value in dict.fromkeys(p[line] for p in shown):
            series = sorted((p[horizontal], p["speedup"]) for p in shown if p[line] == value)
            axis.plot(*zip(*series, strict=True), marker="o", label=str(value))
        axis.axhline(scenario.published, color="black", linestyle="--", linewidth=0.8, label="published")
        axis.set_xscale("log", base=2) if horizontal == "slots" else None
        axis.set_xlabel(horizontal)
        axis.set_title(", ".join(f"{key} {value}" for key, value in zip(others, panel, strict=True)), fontsize=9)
    grid[0][0].set_ylabel("times faster")
    grid[0][-1].legend(title=line, fontsize=7)
    figure.suptitle(scenario.about, fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.svg")
    plt.close(figure)
