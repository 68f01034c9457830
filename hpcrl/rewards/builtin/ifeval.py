"""The reward of instruction following: the share of a row's verifiable instructions that a response follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.config import RewardConfig
from hpcrl.rewards.builtin.instructions import follows, loose_variants, problem
from hpcrl.rewards.grading.extract import after_thinking, json_of
from hpcrl.rewards.reward import PerResponse, RewardItem, Score
from hpcrl.rewards.spec import IFEvalOptions
from hpcrl.spec.options import read_options

COLUMNS = ("instruction_id_list", "kwargs")

Instructions = list[tuple[str, Mapping[str, Any]]]


class IFEvalReward(PerResponse):
    """1 if a response follows all instructions, else 0 or, with `partial`, the share that it follows; the score is 1 or
    0.

    A row has IFEval's columns instruction_id_list and kwargs; or its answer is an object with both, or JSON text of it.
    """

    def __init__(self, config: RewardConfig):
        self.options = read_options(IFEvalOptions, config.options)

    def problem_of_row(self, answer: Any, extra: Mapping[str, Any]) -> str:
        """Reports instructions that are missing or unknown, or lack arguments."""
        try:
            instructions_of(answer, extra)
        except ValueError as error:
            return str(error)
        return ""

    def score_one(self, item: RewardItem) -> Score:
        instructions, text = instructions_of(item.answer, item.extra), after_thinking(item.response).strip()
        texts = loose_variants(text) if self.options.reading == "loose" else [text]
        followed = [any(follows(text, *instruction) for text in texts) for instruction in instructions]
        share, every = sum(followed) / len(followed), float(all(followed))
        return Score(share if self.options.partial else every, every, metrics={"instructions_followed": share})


def instructions_of(answer: Any, extra: Mapping[str, Any]) -> Instructions:
    """(name, arguments) of each instruction of a row. ValueError names what is missing or wrong."""
    given = extra if COLUMNS[0] in extra else json_of(answer)
    if not isinstance(given, Mapping) or COLUMNS[0] not in given:
        raise ValueError(f"the row has no {' and '.join(COLUMNS)}, neither as columns nor in its answer")
    names, arguments = given[COLUMNS[0]], given.get(COLUMNS[1])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"instruction_id_list={names!r} is not a list of names")
    arguments = [{} for _ in names] if arguments is None else arguments
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError(f"kwargs must be a list with an object for each of the {len(names)} instructions")
    for name, own in zip(names, arguments, strict=True):
        if not isinstance(own or {}, Mapping):
            raise ValueError(f"kwargs={own!r} of {name} is not an object")
        if text := problem(name, own or {}):
            raise ValueError(text)
    return [(name, own or {}) for name, own in zip(names, arguments, strict=True)]
