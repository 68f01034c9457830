"""Rewards as users write them, some of them badly."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import numpy as np


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature; does what the response says."""
    print("rewards may print")
    match solution_str:
        case "raise":
            raise RuntimeError("two\nlines")
        case "exit":
            raise SystemExit(0)
        case "cancel":
            raise asyncio.CancelledError
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


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    """verl's signature of a batch: dicts for the first half of the responses, numbers for the others."""
    both = zip(solution_strs, ground_truths, strict=True)
    scores = [float(solution == truth) + bonus for solution, truth in both]
    half = [
        {"score": score, "index": info.get("index", -1), "source": source}
        for score, info, source in zip(scores, extra_infos, data_sources, strict=True)
    ][: len(scores) // 2]
    return half + scores[len(half) : len(scores) - ("short" in solution_strs)]


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
    """A callable object."""

    def __call__(self, solution_str, ground_truth):
        return solution_str == ground_truth


class Unmakable:
    def __init__(self):
        raise RuntimeError("no weights")


def unknown(a, b):
    return 0.0


NUMBER = 3


def completion_lengths(completion_ids, **columns):
    """TRL's signature with token ids alone."""
    return [float(sum(ids)) for ids in completion_ids]


def last_message(completions, level=None):
    """Message lists, without annotations."""
    return [float(completion[-1]["content"] == "yes") for completion in completions]


def get_content(completions):
    return [float(completion[0].get("content", "") == "yes") for completion in completions]


def broken_messages(completions):
    return [completion[0]["content"].no_such_method() for completion in completions]


def only_text(completions):
    return [float(completion.strip() == "yes") for completion in completions]


class Scalar:
    """A tensor without dimensions, as far as rewards look."""

    def __init__(self, value):
        self.value = value

    def tolist(self):
        return self.value

    def __float__(self):
        return float(self.value)


def openrlhf_scalars(queries, prompts, labels):
    """OpenRLHF's published examples: a tensor of rewards, and logs that are one number for the call."""
    import numpy as np

    rewards = np.array([float(query.endswith(label)) for query, label in zip(queries, labels, strict=True)])
    return {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {"mean": rewards.mean().item(), "max": Scalar(2.5), "each": rewards * 2, "numpy": rewards.min()},
    }


def openrlhf_one(queries, prompts, labels):
    return {"rewards": Scalar(0.5), "scores": None, "extra_logs": None}


def any_parameters(**arguments):
    return float(arguments["solution_str"] == arguments["ground_truth"])


def longest(items):
    """1 for the longest group member, else 0."""
    longest_chars = max(len(item.response) for item in items)
    if any(item.response == "raise" for item in items):
        raise RuntimeError("no group")
    if any(item.response == "hang" for item in items):
        time.sleep(1000)
    return [float(len(item.response) == longest_chars) for item in items]


longest.scores = "groups"


def longest_in_parts(items):
    """The same, by tokens for the longest and by turns for the others; each had one turn before."""
    from hpcrl.rewards.reward import Score

    scores = []
    for item, reward in zip(items, longest(items), strict=True):
        first = len(item.earlier[0].token_ids)
        parts = {"token_rewards": {first - 1: 0.25, first + 3: 0.75}} if reward else {"turn_rewards": [0.5, -0.5]}
        scores.append(Score(reward, reward, **parts))
    return scores


longest_in_parts.scores = "groups"


async def judge(items):
    """Waits for a service; `block` blocks the event loop, which no coroutine may do."""
    (item,) = items
    match item.response:
        case "slow":
            await asyncio.sleep(1000)
        case "block":
            time.sleep(1000)
        case "die":
            os._exit(3)
        case "raise":
            raise RuntimeError("no service")
        case "own timeout":
            raise TimeoutError("the service's")
        case _:
            await asyncio.sleep(0.3)
    return [float(item.response == item.answer)]


judge.pool = "async"


async def judge_groups(items):
    await asyncio.sleep(0.01)
    return [float(len(items)) for _ in items]


judge_groups.pool = "async"
judge_groups.scores = "groups"


def wrong_pool(items):
    return [0.0 for _ in items]


wrong_pool.pool = "async"


def wrong_scores(solution_str, ground_truth):
    return 0.0


wrong_scores.scores = "groups"


def unknown_scores(items):
    return [0.0 for _ in items]


unknown_scores.scores = "pairs"


def counted(items):
    """Writes down every response that it is called with; pure, so that it is not called with an equal one."""
    with open(items[0].extra["log"], "a", encoding="utf-8") as log:
        log.writelines(f"{item.response}\n" for item in items)
    if items[0].response == "raise":
        raise RuntimeError("not remembered")
    return [float(item.response == item.answer) for item in items]


counted.pure = True


def nemo(ground_truth, response, bonus=0.0):
    """NeMo-RL's signature."""
    if response == "form":
        return 0.25, None
    if response == "one":
        return 1.0
    return (response == ground_truth) + bonus, response == ground_truth


class Environment:
    """NeMo-RL's, of one turn: 1 for the ground truth."""

    def step(self, message_log_batch, metadata):
        """Rewards, which a tensor would hold."""
        said = [log[-1]["content"] for log in message_log_batch if log[0]["role"] == "user"]
        right = [float(text == row["ground_truth"]) for text, row in zip(said, metadata, strict=True)]
        return SimpleNamespace(rewards=np.array(right))

    def global_post_process_and_metrics(self, batch):
        """Not called."""


class RayActor(Environment):
    """Has methods like a Ray actor handle."""

    step = type("Method", (), {"__call__": lambda self, *_: None, "remote": None})()


def rubric():
    """A real one of verifiers."""
    import verifiers

    async def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    def hard(level, prompt):
        return level * len(prompt)

    return verifiers.Rubric(funcs=[right, hard], weights=[1.0, 0.5])


def rubric_of_groups():
    """A real rubric that compares group members."""
    import verifiers

    def shortest(completions) -> list:
        lengths = [len(messages[-1]["content"]) for messages in completions]
        return [float(length == min(lengths)) for length in lengths]

    return verifiers.Rubric(funcs=[shortest])


class Recorded:
    """What is called of verifiers' Rubric (0.1.14), as recorded there: names of methods and parameters, and the keys of
    a state that the real one reads and writes."""

    has_group_rewards = False

    def __init__(self):
        self.funcs = [self.right]

    async def right(self, completion, answer):
        """One of its functions."""
        return float(completion[-1]["content"] == answer)

    async def score_rollout(self, state):
        """Writes into the state."""
        level = state["input"].get("level", 0)
        assert state["trajectory"] == [] and state["prompt"][0]["role"] == "user" and state.get("task") == "domain"
        right = await self.right(state["completion"], state["answer"])
        state["reward"], state["metrics"] = right + 0.5 * level, {"right": right, "hard": level}

    async def score_group(self, states):
        """Not called without functions of groups."""
