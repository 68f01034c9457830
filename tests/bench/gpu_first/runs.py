"""Figures of a finished run as rows, beside its plan; with a second run, what is not bit for bit the same in both.

python -m tests.bench.gpu_first.runs RUN [OTHER]
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from statistics import median

from hpcrl.metrics.log import read_metrics
from tests.bench.gpu.common import Row

UNITS = {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}
TIMED = ("time/", "system/", "scheduler/")
PHASES = {"generation": "time/step_generate", "training": "time/step_train", "new weights": "time/step_update_weights"}
MISMATCH = {"difference of probabilities": "mismatch/diff/mean", "KL of log-probs": "mismatch/kl_k3"}


def say_figures(run: Path) -> None:
    """Steps, resumes, seconds, the trainer beside the generator, the peak beside the plan."""
    rows = [row for row in read_metrics(run) if row["step"] > 0]
    Row("", "steps", len(rows)).say()
    attempts = json.loads((run / "facts.json").read_text())["attempts"]
    Row("", "resumes", sum(attempt["kind"] == "resume" for attempt in attempts)).say()
    Row("", "of a step", median(row["time/step_total"] for row in rows), "s").say()
    for what, key in PHASES.items():
        Row("", what, median(row[key] for row in rows), "s").say()
    for what, key in MISMATCH.items():
        Row("", what, max(row[key] for row in rows), note=f"{key}, the largest").say()
    Row("", "gradient norm", min(row["actor/grad_norm"] for row in rows), note="the smallest").say()
    found = re.search(r"([\d.]+) (KiB|MiB|GiB) at most", (run / "plan.txt").read_text())
    plan = float(found[1]) * UNITS[found[2]] if found else None
    Row("", "peak in training", max(row["system/train/peak_gib"] for row in rows), "GiB", plan, note="the plan").say()


def say_differences(run: Path, other: Path) -> None:
    """How many metrics (but those of time) and bytes of weights differ."""
    pairs = list(zip(read_metrics(run), read_metrics(other), strict=True))
    names = sorted(
        {key for one, two in pairs for key in one | two if json.dumps(one.get(key)) != json.dumps(two.get(key))}
    )
    names = [name for name in names if not name.startswith(TIMED)]
    Row("", "metrics that differ", len(names), note=", ".join(names)[:200]).say()
    files = sorted(path.relative_to(run) for path in (run / "hf").glob("*.safetensors"))
    differ = [str(file) for file in files if (run / file).read_bytes() != (other / file).read_bytes()]
    Row("", "weights that differ", len(differ) if files else None, "files", note=", ".join(differ)).say()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path, nargs="?")
    words = parser.parse_args()
    say_figures(words.run)
    if words.other is not None:
        say_differences(words.run, words.other)


if __name__ == "__main__":
    main()
