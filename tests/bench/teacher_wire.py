"""Bytes on the wire that a teacher on ranks of its own adds to a run, a token, by teacher.form.

    python -m tests.bench.teacher_wire [--forms sampled top_k full] [--top-k N] [--steps N]

Real runs of pipeline=distill: processes for controller, trainer, generator and teacher, gloo over the loopback
interface of a network namespace of the bench's own, whose kernel counts every byte with its headers. The student has 2
layers of 64, the teacher of 128, prompts have 96 to 128 tokens, a step 16 answers of at most 32. The same run without
a teacher (pipeline=rlvr) is subtracted: the rest are the responses sent to the teacher, its commands and its answers.

One JSON line per form: `added_per_trained_token` and `added_per_token`, prompts included; `fields_per_trained_token`,
the size of the teacher's fields by definition.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import Any

from hpcrl.metrics.log import read_metrics
from tests.bench.given_rows import Words, make_model, write_jsonl
from tests.bench.machine import tell
from tests.bench.trainers import alone, loopback_bytes
from tests.bench.vs_trl import LIMIT_S, ROOT

WARM_STEPS, WIDTH, NUM_PROMPTS, GROUP = 2, 128, 8, 2
TINY = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 192}
LAYOUT = "layout=disaggregated layout.trainer.num_ranks=1 layout.generator.num_ranks=1 layout.reward.num_ranks=null "
LAYOUT += "layout.reward.colocate_with=generator cluster.oversubscribe=true cluster.device=cpu"


def measure(folder: Path, name: str, words: list[str], steps: int) -> dict[str, float]:
    """Bytes and tokens of a step after the warm ones."""
    run_dir = folder / name
    given = [*LAYOUT.split(), f"model.path={folder / 'student'}", f"data.train={folder / 'rows.jsonl'}", *words]
    given += [f"rollout.num_prompts={NUM_PROMPTS}", f"rollout.group_size={GROUP}", "rollout.max_new_tokens=32"]
    given += [
        "save_every=0",
        "eval_every=0",
        f"max_steps={steps}",
        "reward.default.name=exact_match",
        f"run_dir={run_dir}",
    ]
    with open(folder / f"{name}.log", "w") as log:
        process = Popen([sys.executable, "-m", "hpcrl.launch", *given], cwd=ROOT, stdout=log, stderr=STDOUT)
        counts: dict[int, int] = {}
        deadline = time.monotonic() + LIMIT_S
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if rows := read_metrics(run_dir):
                    counts.setdefault(int(rows[-1]["step"]), loopback_bytes())
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"hpcrl ended with {process.returncode}:\n{(folder / f'{name}.log').read_text()[-3000:]}")
    first, last = min(step for step in counts if step >= WARM_STEPS), max(counts)
    rows = [row for row in read_metrics(run_dir) if first < row["step"] <= last]
    found = {"bytes": (counts[last] - counts[first]) / (last - first)}
    for key, figure in (("prompt", "token/prompt_length/mean"), ("trained", "token/response_length/mean")):
        found[key] = NUM_PROMPTS * GROUP * sum(row[figure] for row in rows) / len(rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--forms", nargs="+", default=["sampled", "top_k", "full"], choices=["sampled", "top_k", "full"]
    )
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    if not alone("tests.bench.teacher_wire"):
        tell({"bench": "teacher_wire", "skipped": "no network namespace can be made here (unshare --net, ip)"})
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    fields = {"sampled": 4, "top_k": 8 * options.top_k, "full": 4 * WIDTH}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = Words(make_model(folder / "student", **TINY))
        make_model(folder / "teacher", **{**TINY, "hidden_size": WIDTH, "intermediate_size": 384, "seed": 1})
        write_jsonl(folder / "rows.jsonl", ({"prompt": words.text(90, 122), "answer": "none"} for _ in range(512)))
        without = measure(folder, "none", ["pipeline=rlvr", "algorithm=grpo"], options.steps)
        for form in options.forms:
            taught = ["pipeline=distill", f"teacher.path={folder / 'teacher'}", f"teacher.form={form}"]
            taught += [f"teacher.top_k={options.top_k}"] if form == "top_k" else []
            found = measure(folder, form, taught, options.steps)
            added = found["bytes"] - without["bytes"]
            report: dict[str, Any] = {
                "bytes_per_step": round(found["bytes"]),
                "without_teacher": round(without["bytes"]),
                "trained_tokens_per_step": round(found["trained"], 1),
                "prompt_tokens_per_step": round(found["prompt"], 1),
                "added_per_trained_token": round(added / found["trained"], 1),
                "added_per_token": round(added / (found["trained"] + found["prompt"]), 1),
                "fields_per_trained_token": fields[form],
            }
            tell({"bench": "teacher_wire", "form": form, **report})


if __name__ == "__main__":
    main()
