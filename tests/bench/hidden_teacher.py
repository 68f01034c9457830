"""The teacher's share of a step of on-policy distillation, and how much of it is hidden behind generation.

    python -m tests.bench.hidden_teacher [--form sampled|top_k|full] [--steps N] [--teacher-width N]

Real runs with processes for controller, trainer, generator and teacher, with rollout.max_staleness=0, then with 1. The
student has 2 layers of 128, the teacher 4 of 384, which takes longer than the student's training; 32 answers a step of
at most 128 tokens. From the timelines of the steps after the warm ones: the teacher's pass (`teach_s`) and its share of
a step, the seconds for which the replica decoded, and of the teacher's passes the share (`hidden`) during which the
replica decoded a chunk. The wall seconds depend on what else runs; the overlap within a run less so. One JSON line.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from hpcrl.timeline.step_file import ChunkRow, CommandRow, path_of, read_step, recorded_steps
from tests.bench.given_rows import Words, make_model, write_jsonl
from tests.bench.machine import tell
from tests.bench.teacher_wire import LAYOUT
from tests.bench.vs_trl import launch

WARM_STEPS = 2
STUDENT = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 384}
ROLLOUTS = "rollout.num_prompts=32 rollout.group_size=1 rollout.max_new_tokens=128 generator.decode_chunk_tokens=8"
Spans = list[tuple[float, float]]


def overlap(spans: Spans, others: Spans) -> float:
    """Seconds of `spans` that are within `others`; the spans of a list do not overlap each other."""
    return sum(max(0.0, min(end, to) - max(start, since)) for start, end in spans for since, to in others)


def figures(run_dir: Path) -> dict[str, float]:
    """From the timelines of complete steps after the warm ones."""
    taught: Spans = []
    decoded: Spans = []
    trained: Spans = []
    seconds: list[float] = []
    for number in recorded_steps(run_dir):
        step = read_step(path_of(run_dir, number))
        began = step.header.began

        def span(row: ChunkRow | CommandRow, began: float = began) -> tuple[float, float]:
            return began + 1e-6 * row.start, began + 1e-6 * (row.start + row.duration)

        decoded += [span(row) for row in step.chunks]
        if number > WARM_STEPS:
            taught += [span(row) for row in step.commands if row.name == "Teach"]
            trained += [span(row) for row in step.commands if row.name == "TrainStep"]
            seconds.append(step.header.seconds)
    count, teach = len(seconds), sum(end - start for start, end in taught)
    return {
        "steps": count,
        "step_s": round(statistics.mean(seconds), 3),
        "decode_s": round(sum(end - start for start, end in decoded) / len(recorded_steps(run_dir)), 3),
        "train_s": round(sum(end - start for start, end in trained) / count, 3),
        "teach_s": round(teach / count, 3),
        "share": round(teach / sum(seconds), 3),
        "hidden": round(overlap(taught, decoded) / teach, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=["sampled", "top_k", "full"], default="sampled")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--teacher-width", type=int, default=384)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    result: dict[str, Any] = {"bench": "hidden_teacher", "form": options.form, "teacher_width": options.teacher_width}
    width = options.teacher_width
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student = make_model(folder / "student", **STUDENT)
        teacher = make_model(folder / "teacher", hidden_size=width, intermediate_size=3 * width, seed=1)
        words = Words(student)
        rows = write_jsonl(folder / "rows.jsonl", ({"prompt": words.text(16, 48), "answer": ""} for _ in range(1024)))
        given = ["pipeline=distill", f"model.path={student}", f"teacher.path={teacher}", f"teacher.form={options.form}"]
        given += [*LAYOUT.split(), *ROLLOUTS.split(), f"data.train={rows}", "reward.default.name=none"]
        given += ["save_every=0", "eval_every=0", f"max_steps={options.steps}"]
        for lag in (0, 1):
            launch([*given, f"rollout.max_staleness={lag}"], folder / f"lag_{lag}")
            result[f"max_staleness_{lag}"] = figures(folder / f"lag_{lag}")
    tell(result)


if __name__ == "__main__":
    main()
