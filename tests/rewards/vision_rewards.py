"""Reward functions in the shape of verl's vision recipes: the scorer of geo3k, and a custom function that calls it.

Adapted shape, not verl's code: answers are compared as text here, where verl calls the package mathruler.
"""

from __future__ import annotations

import re


def format_reward(predict_str: str) -> float:
    """1 for thinking in tags and then a box."""
    return float(re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", predict_str, re.DOTALL) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """1 for the right answer."""
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", predict_str)
    answer = (boxes[-1] if boxes else "") if use_boxed else predict_str
    return float(answer.replace(" ", "") == ground_truth.replace(" ", ""))


def geo3k(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """verl's compute_score of geo3k."""
    right = acc_reward(predict_str, ground_truth, use_boxed)
    return (1 - format_score) * right + format_score * format_reward(predict_str)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    """verl's custom_reward_function, which chooses by the data source."""
    if data_source != "hiyouga/geometry3k":
        raise NotImplementedError(data_source)
    assert extra_info is not None
    score = geo3k(solution_str, ground_truth)
    return {"score": score, "acc": acc_reward(solution_str, ground_truth), "index": extra_info["index"]}
