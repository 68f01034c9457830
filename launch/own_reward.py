"""A run with a reward of one's own, from plan to responses, in one script (docs/python.md).

    python launch/own_reward.py [KEY=VALUE ...]

The words go to hpcrl: python launch/own_reward.py max_steps=60 run_name=longer
"""

from __future__ import annotations

import argparse

import hpcrl
from hpcrl.system.cli import in_shell


def score(completions: list[str], **columns: object) -> list[float]:
    """The share of digits and blanks in each response, which a model with random weights learns to write in seconds."""
    return [sum(letter in "0123456789 " for letter in text) / max(1, len(text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=in_shell(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    run = hpcrl.train(
        *parser.parse_args().words,
        experiment="demo",
        layout="single",
        run_name="own_reward",
        max_steps=15,
        eval_every=0,
        reward=score,
        rollout={"num_prompts": 16, "group_size": 8, "max_new_tokens": 12, "filter_std": False},
        algorithm={"num_mini_batches": 1},
        trainer={"lr": 1e-2},
    )
    rewards = run.metrics["critic/rewards/mean"]
    print(f"{run.state}: reward {rewards[1]:.3f} -> {rewards[-1]:.3f}")
    best = max(run.samples(run.step), key=lambda sample: sample.reward)
    print(f"best sample of step {run.step}: reward {best.reward:.3f}: {best.prompt!r} -> {best.response!r}")
    ((greedy,),) = hpcrl.Generator(run).generate("sort: 3 1 2", max_new_tokens=12)
    print(f"final model: {greedy.text!r}")


if __name__ == "__main__":  # processes of the run import this file for its reward
    main()
