"""Whether learning from teachers and from pairs learns, on the demonstration's task and from its warm start.

    python -m tests.bench.teachers --model runs/demo_sft/hf --teacher runs/demo/hf --out FILE [--only NAMES]
        [--seeds 0 1 2] [--jobs N] [--runs FOLDER] [--plots FOLDER]

Distillation on policy beside GRPO with as many responses a step; DPO on pairs of the warm model's own answers; reward
models: from the warm model on these pairs, and from a larger warm start on these and made-up ones; RL on these reward
models. RUNS has the keys of each. One process and one thread each. `--out` gets one JSON line per run; runs that it
already has are not run again, nor are runs, models, answers and pairs that `--runs` has. Prints tables, and draws the
curves into `--plots`. Accuracies are those of validation, by the task's own reward, on prompts that the seed chooses.
RL on reward models of an earlier call needs its `--runs`.
"""

from __future__ import annotations

import argparse
import itertools
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrl.metrics.log import read_metrics
from tests.bench.learning import Line, completed, curves, run_folder
from tests.bench.machine import machine
from tests.bench.own_pairs import corrupted_pairs, grouped_pairs, write_pairs
from tests.bench.teachers_shown import plots, tables
from tests.bench.vs_trl import launch

CORRUPTED = 30_000
HELD_OUT = 512  # groups of own answers, of each of which the reward models are judged on a pair
FIGURES = {
    "greedy": "val/score/mean",
    "sampled": "val/sampled/score/mean",
    "reward": "critic/rewards/mean",
    "kl": "critic/kl",
    "tokens": "token/response_length/mean",
    "divergence": "distill/divergence",
    "pairs": "val/accuracy",
}


@dataclass(frozen=True)
class Learning:
    """The keys of a run (with $NAME for a file), and its number of steps."""

    words: Sequence[str]
    steps: int
    eval_every: int = 5
    model: str = "$model"


def _distilled(form: str, beta: float) -> Learning:
    """From one response to each of 512 prompts a step."""
    words = ["pipeline=distill", "cluster.device=cpu", "data.train=task:sort_digits", "data.val=task:sort_digits"]
    words += ["data.max_prompt_tokens=64", "rollout.max_new_tokens=24", "rollout.num_prompts=512"]
    words += ["rollout.group_size=1", "teacher.path=$teacher", f"teacher.form={form}", f"teacher.beta={beta}"]
    words += ["teacher.top_k=8"] if form == "top_k" else []
    words += ["algorithm.num_mini_batches=16", "trainer.lr=2e-3", "trainer.lr_schedule=linear", "trainer.min_lr=1e-4"]
    return Learning([*words, "trainer.max_grad_norm=1.0"], 30)


def _reward_model(model: str, pairs: str, batch: int, lr: str, warmup: int, steps: int, eval_every: int) -> Learning:
    words = ["+experiment=reward_model_tiny", "layout.trainer.num_ranks=1", f"rm.batch_size={batch}"]
    words += [f"data.train={pairs}", "data.val=$held_out", f"trainer.lr={lr}", "trainer.lr_schedule=linear"]
    return Learning([*words, f"trainer.lr_warmup_steps={warmup}"], steps, eval_every=eval_every, model=model)


def _scored(model: str, *words: str) -> Learning:
    """RL whose only reward is a reward model's score; validation has the task's reward."""
    truth = ["data.val=[{path: task:sort_digits, domain: truth}]", "+reward.truth.name=sort_digits"]
    scored = ["+reward.default.name=reward_model", f"reward_model.path={model}"]
    return Learning(["+experiment=demo", "rollout.filter_std=false", *truth, *scored, *words], 30)


LARGER = ["+experiment=demo_sft", "layout=single", "model.tiny.hidden_size=128", "model.tiny.intermediate_size=384"]
LARGER += ["model.tiny.num_layers=3", "sft.stop_score=0.9", "max_steps=1200", "eval_every=200", "save_every=0"]
LARGER += ["trainer.lr=3e-3", "trainer.lr_schedule=linear", "trainer.max_grad_norm=1.0"]
RUNS = {
    "teacher": Learning(["+experiment=demo"], 1, model="$teacher"),  # for its accuracy before the step
    "grpo": Learning(["+experiment=demo"], 80),
    "full_0": _distilled("full", 0.0),
    "full_0.5": _distilled("full", 0.5),
    "full_1": _distilled("full", 1.0),
    "top_k_0": _distilled("top_k", 0.0),
    "dpo": Learning(["+experiment=demo_dpo", "data.train=$answers"], 100, eval_every=20),
    "own_pairs_model": _reward_model("$model", "$pairs", 128, "4e-3", warmup=20, steps=400, eval_every=50),
    "reward_model": _reward_model("$larger", "$mixed", 64, "1e-3", warmup=50, steps=1200, eval_every=100),
    "on_own_pairs": _scored("$own_pairs_model", "algorithm.kl_reward_coef=0.1"),
    "scored": _scored("$reward_model", "trainer.lr=3e-4", "algorithm.kl_reward_coef=1e-12"),  # the KL is only measured
    "scored_kl": _scored("$reward_model", "trainer.lr=3e-4", "algorithm.kl_reward_coef=0.15"),
}
MODELS = {"own_pairs_model", "reward_model"}
NEED_MODELS = {"on_own_pairs", "scored", "scored_kl"}
NEED_PAIRS = {"dpo", *MODELS}
OWN = "own_answers"


def larger_model(folder: Path) -> str:
    """A model with five times the warm one's parameters and the same tokenizer, from the task's answers only."""
    if not (folder / "larger" / "hf").exists():
        launch(LARGER, folder / "larger")
    return str(folder / "larger" / "hf")


def own_pairs(model: str, folder: Path) -> dict[str, str]:
    """The files of pairs of the model's own answers to 6,144 prompts, which are made if `folder` lacks them: $answers
    with a pair of each prompt that has one, $pairs with all different wrong answers, $held_out of other prompts, and
    $mixed: $pairs and CORRUPTED pairs with made-up wrong answers."""
    files = {name: folder / f"{name}.jsonl" for name in ("answers", "pairs", "held_out", "mixed")}
    if not all(file.exists() for file in files.values()):
        words = ["+experiment=demo", "layout=single", f"model.path={model}", "debug=rollout_only", "data.val=null"]
        words += ["rollout.save_rollouts=true", "rollout.filter_std=false", "rollout.num_prompts=256", "max_steps=24"]
        if len(read_metrics(folder / OWN)) < 24:
            launch(words, folder / OWN)
        found = grouped_pairs(folder / OWN)
        held, rest = found[-HELD_OUT:], found[:-HELD_OUT]
        seen = {rows[0]["prompt"] for rows in held}
        rest = [rows for rows in rest if rows[0]["prompt"] not in seen]
        write_pairs(files["answers"], [rows[0] for rows in rest])
        write_pairs(files["pairs"], itertools.chain(*rest))
        write_pairs(files["mixed"], itertools.chain(*rest, corrupted_pairs(CORRUPTED, seen, seed=1)))
        write_pairs(files["held_out"], [rows[0] for rows in held])
    return {name: str(file) for name, file in files.items()}


def run(seed: int, name: str, places: dict[str, str], folder: Path) -> Line:
    """The line of one run. places: what stands for $NAME in its keys."""
    learning, run_dir = RUNS[name], folder / f"{name}_{seed}"
    places = places | {of: str(folder / f"{of}_{seed}" / "hf") for of in MODELS}
    if (rows := read_metrics(run_dir)) == [] or rows[-1]["step"] != learning.steps:
        words = [*learning.words, f"model.path={learning.model}"]
        words = [string.Template(word).substitute(places) for word in words]
        words += [f"seed={seed}", f"max_steps={learning.steps}", f"eval_every={learning.eval_every}", "save_every=0"]
        words += ["eval.num_prompts=512", *([] if name in MODELS else ["layout=single"])]
        launch(words, run_dir)
    return {"run": name, "seed": seed, "steps": learning.steps, **curves(run_dir, FIGURES), **machine()}


def main() -> int:
    """Run what `--out` lacks, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the warm start, such as runs/demo_sft/hf")
    parser.add_argument("--teacher", help="what was trained from there, such as runs/demo/hf")
    parser.add_argument("--out", type=Path, help="JSON lines, one per run; runs that it has are not repeated")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one core each")
    parser.add_argument("--runs", type=Path, help="keep the runs here (default: they are removed)")
    parser.add_argument("--plots", type=Path, help="the folder of the plots")
    options = parser.parse_args()
    if not (options.model and options.teacher and options.out):
        print("teachers needs --model, such as runs/demo_sft/hf, --teacher and --out", file=sys.stderr)
        return 0
    places = {"model": options.model, "teacher": options.teacher}
    todo = [(seed, name) for seed in options.seeds for name in options.only]
    with run_folder(options.runs) as folder:
        if any(name in NEED_PAIRS for _, name in todo):
            places |= own_pairs(options.model, folder)
        if "reward_model" in options.only:
            places["larger"] = larger_model(folder)

        def one(seed: int, name: str) -> Line:
            return run(seed, name, places, folder)

        for late in (False, True):
            now = [which for which in todo if (which[1] in NEED_MODELS) == late]
            lines = completed(options.out, ("seed", "run"), now, one, options.jobs)
    if options.plots:
        plots(lines, options.plots)
    print(tables(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
