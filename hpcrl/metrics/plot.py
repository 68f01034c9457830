"""plot.png: the learning curves of a run.

python -m hpcrl plot RUN      plots the steps so far; a successful run creates its plot at the end

RUN is a run's folder, or its name in runs/.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.metrics.curves import curve, validated_domains
from hpcrl.metrics.log import read_metrics
from hpcrl.system.cli import in_shell, use_utf8
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import write_durably

PANELS = (
    ("critic/rewards/mean", "training reward", "#3b6fb6"),
    ("distill/reverse_kl", "reverse KL to the teacher", "#7a5195"),
    ("distill/divergence", "divergence from the teacher", "#7a5195"),
    ("sft/loss", "training loss", "#7a5195"),
    ("rm/loss", "training loss of the reward model", "#7a5195"),
    ("loss", "training loss", "#7a5195"),
    ("rewards/accuracies", "pairs ranked as labelled", "#3b6fb6"),
    ("val/rewards/accuracies", "held-out pairs ranked as labelled", "#d1603d"),
    ("val/score/mean", "validation accuracy", "#d1603d"),
    ("val/accuracy", "held-out accuracy", "#d1603d"),
)
SAMPLED = "val/sampled/score/mean"
MAX_LABEL_CHARS = 40
SMOOTHING_STEPS = 9  # odd, so the mean is centred on the step


def plot(run_dir: Path) -> Path:
    """Draw reward (or loss) and validation accuracy of metrics.jsonl against the step; returns the path of plot.png.
    Panels without measurements are omitted. ValueError if there is nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such folder")
    rows = read_metrics(run_dir)
    curves = [(label, color, points) for name, label, color in PANELS if (points := curve(rows, name))[0]]
    if not curves:
        raise ValueError(
            f"{run_dir} has no metrics to plot; it needs one of {', '.join(name for name, _, _ in PANELS)}"
        )
    figure = Figure(figsize=(7.2, 1.2 + 2.4 * len(curves)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (label, color, (steps, values)) in zip(
        figure.subplots(len(curves), sharex=True, squeeze=False)[:, 0], curves, strict=True
    ):
        if label.startswith("training"):
            axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
            axes.plot(steps, _smooth(values), color=color, linewidth=2, label=f"mean of {SMOOTHING_STEPS} steps")
            axes.legend(loc="best", frameon=False, fontsize=8)
        else:
            axes.plot(steps, values, color=color, linewidth=2, marker="o", markersize=4, label="at eval.temperature")
            for index, offset in {0: (7, -10), len(steps) - 1: (-7, 9)}.items():
                text, point = f"{values[index]:.3f}", (steps[index], values[index])
                axes.annotate(text, point, xytext=offset, textcoords="offset points", ha="center", fontsize=9)
            sampled = curve(rows, SAMPLED)
            if sampled[0]:
                axes.plot(*sampled, color=color, linewidth=1.2, linestyle="--", marker=".", label="sampled")
            for name, values_of_domain in validated_domains(rows).items():
                axes.plot(*values_of_domain, linewidth=1, alpha=0.8, label=name[:MAX_LABEL_CHARS])
            axes.legend(loc="best", frameon=False, fontsize=8)
            axes.margins(y=0.2)
        axes.set_ylabel(label)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    figure.suptitle(run_dir.resolve().name, fontsize=12, fontweight="bold")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_durably(run_dir / "plot.png", picture.getvalue())
    return run_dir / "plot.png"


def _smooth(values: Sequence[float]) -> list[float]:
    """Moving mean over SMOOTHING_STEPS values; over fewer at both ends."""
    half = SMOOTHING_STEPS // 2
    windows = (values[max(0, middle - half) : middle + half + 1] for middle in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(in_shell(__doc__))
        return ExitCode.DONE if list(argv) in (["-h"], ["--help"]) else ExitCode.BAD_INPUT
    try:
        given = Path(argv[0])
        named = "runs" / given
        print(plot(named if named.is_dir() and not given.is_dir() else given))
    except (ValueError, OSError) as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    return ExitCode.DONE


if __name__ == "__main__":
    use_utf8()
    sys.exit(main(sys.argv[1:]))
