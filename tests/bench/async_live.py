"""Wall time of a step when generation and training overlap: real processes, the native generator, long-tailed answers.

    python -m tests.bench.async_live [--steps N] [--only answers|environments]

Four processes each time: controller, trainer, generator, reward. staleness 0 against 1 and 2. The model is random, 4
layers of 256, and ends an answer at every token with probability 1/64 (vs_trl's long setting): the longest of 128 is
about seven times the median. One JSON line: seconds of a step, of it the trainer waiting for a batch and for its
weights to be taken, decode rate, the speed-up, and its bound: sync generation + training over the longer of the two.

Then the same with environments that answer late (tests/bench/slow_env.py: three turns of N(.2, .06) s, one in a
hundred ten times as long; up to 16 tokens a turn), all of them at once. The slowest of a batch holds a synchronous step
up; ahead of it they only have to be there in the mean.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from hpcrl.metrics.log import read_metrics
from tests.bench.machine import tell
from tests.bench.vs_trl import launch, make_long_model, write_rows

WARM_STEPS = 3
LAYOUT = "layout=disaggregated layout.trainer.num_ranks=1 layout.generator.num_ranks=1"
ANSWERS = "rollout.num_prompts=16 rollout.group_size=8 rollout.max_new_tokens=256 algorithm.num_mini_batches=1"
LATE = """
rollout.num_prompts=8 rollout.group_size=8 rollout.max_new_tokens=16 algorithm.num_mini_batches=1 env.default.name=class
env.default.class_path=tests.bench.slow_env:SlowEnv env.default.max_turns=3 env.default.num_threads=256
+env.default.options.mean_s=0.2 +env.default.options.std_s=0.06
layout.env.num_ranks=1 layout.reward.num_ranks=null layout.reward.colocate_with=env cluster.oversubscribe=true
generator.max_num_seqs=64 generator.max_requests=256 generator.decode_chunk_tokens=4
"""
TAILS = {"answers": ANSWERS, "environments": LATE}
FIGURES = {
    "step_s": "time/step_total",
    "waits_for_batch_s": "time/step_generate",
    "train_s": "time/step_train",
    "old_logprobs_s": "time/old_log_probs",
    "publish_s": "time/step_update_weights",
    "decode_tps": "system/decode_tps",
    "lag": "scheduler/staleness/mean",
}


def measure(model: Path, rows: Path, sizes: str, max_staleness: int, steps: int, run_dir: Path) -> dict[str, float]:
    """Means over the steps after the warm ones."""
    words = ["pipeline=rlvr", "algorithm=grpo", *LAYOUT.split(), *sizes.split(), "save_every=0", "eval_every=0"]
    words += [
        f"model.path={model}",
        f"data.train={rows}",
        f"rollout.max_staleness={max_staleness}",
        f"max_steps={steps}",
    ]
    launch([*words, "reward.default.name=exact_match", "trainer.lr=1e-5"], run_dir)
    metrics = [row for row in read_metrics(run_dir) if row["step"] > WARM_STEPS]
    found = {name: statistics.mean(float(row.get(key) or 0.0) for row in metrics) for name, key in FIGURES.items()}
    tokens = statistics.mean(float(row["token/response_length/mean"] or 0.0) for row in metrics)
    return {name: round(value, 4) for name, value in found.items()} | {"mean_response_tokens": round(tokens, 1)}


def main() -> None:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", choices=TAILS, help="the other tail is left out")
    options = parser.parse_args()
    steps, tails = options.steps, {kind: sizes for kind, sizes in TAILS.items() if options.only in (None, kind)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_long_model(folder / "model")
        rows, _ = write_rows(folder)
        for kind, sizes in tails.items():
            result: dict[str, object] = {"bench": "async_live", "tail": kind}
            found = {
                lag: measure(folder / "model", rows, sizes, lag, steps, folder / f"{kind}_{lag}") for lag in (0, 1, 2)
            }
            sync = found[0]
            generates, trains = sync["waits_for_batch_s"], sync["step_s"] - sync["waits_for_batch_s"]
            for lag, figures in found.items():
                result[f"lag_{lag}"] = figures
                if lag:
                    result[f"speedup_lag_{lag}"] = round(sync["step_s"] / figures["step_s"], 2)
            result["bound"] = round(sync["step_s"] / max(generates, trains), 2)
            tell(result)


if __name__ == "__main__":
    main()
