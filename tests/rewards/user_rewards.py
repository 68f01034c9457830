"""Rewards as users write them, some of them badly."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature; does what the response says."""
    print("rewards may print")
    match solution_str:
        case "raise":
            raise RuntimeError("two\nlines")
        case "exit":
            raise SystemExit(0)
        case "hang":
            time.sleep(1000)
        case "spawn and hang":
            subprocess.Popen(["sleep", f"{extra_info['sleep']}"])
            time.sleep(1000)
        case "die":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "nan":
            return float("nan")
        case "inf":
            return {"score": float("inf")}
        case "text":
            return "1.0"
        case "none":
            return None
        case "dict":
            return {"score": 0.5, "acc": True, "note": "text"}
        case "source":
            return {"score": 1.0, "gsm8k": data_source == "openai/gsm8k", "index": extra_info["index"]}
    return float(solution_str == ground_truth)


def trl(prompts, completions, level, bonus=0.0, **columns):
    """TRL's signature, a batch at a time."""
    if "raise" in completions:
        raise KeyError("level")
    if "die" in completions:
        os._exit(1)
    if "hang" in completions:
        time.sleep(1000)
    if "short" in completions:
        return [1.0]
    return [
        None if completion == "skip" else float("nan") if completion == "nan" else len(completion) + step + bonus
        for completion, step in zip(completions, level, strict=True)
    ]


async def trl_async(completions, answer):
    """Asynchronous, with few of the columns."""
    await asyncio.sleep(0)
    return [float(completion == gold) for completion, gold in zip(completions, answer, strict=True)]


def trl_messages(prompts, completions, **columns):
    """For message lists."""
    return [
        float(c[0]["content"] == "yes" and p[0]["role"] == "user") for p, c in zip(prompts, completions, strict=True)
    ]


def reward_func(queries, prompts, labels, **kwargs):
    """OpenRLHF's signature."""
    rewards = [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels, strict=True)]
    return {"rewards": rewards, "scores": [0.5] * len(rewards), "extra_logs": {"length": [len(q) for q in queries]}}


def native(items):
    """hpcrl's own signature."""
    return [float(item.response == item.answer and item.finish_reason == "stop") for item in items]


class Judge:
    """An object that is called."""

    def __call__(self, solution_str, ground_truth):
        return solution_str == ground_truth


class Unmakable:
    def __init__(self):
        raise RuntimeError("no weights")


def unknown(a, b):
    return 0.0


NUMBER = 3
