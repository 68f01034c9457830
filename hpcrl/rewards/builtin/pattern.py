"""Format rewards: whether a response matches a regular expression, or is JSON that fits a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import regex

from hpcrl.config import RewardConfig
from hpcrl.rewards.grading.extract import CLOSED_BLOCK, after_thinking
from hpcrl.rewards.reward import PerResponse, RewardItem, Score
from hpcrl.rewards.spec import JsonSchemaOptions, RegexOptions
from hpcrl.spec.options import read_options

LIMIT_S = 2.0
"""Time limit of one search; an expression such as (x+x+)+y may need exponential time."""


class RegexReward(PerResponse):
    """1 if the regular expression (an option, or the row's answer) is found, else 0. A slow search is an error."""

    def __init__(self, config: RewardConfig):
        self.options = read_options(RegexOptions, config.options)

    def problem_of_row(self, answer: Any, extra: Mapping[str, Any]) -> str:
        """Reports an answer that is not a regular expression."""
        if self.options.pattern is not None:
            return ""
        if not isinstance(answer, str):
            return "no answer, which is the regular expression if reward.*.options.pattern is null"
        try:
            regex.compile(answer)
        except regex.error as error:
            return f"the answer {answer[:40]!r} is not a regular expression: {error}"
        return ""

    def score_one(self, item: RewardItem) -> Score:
        pattern = self.options.pattern if self.options.pattern is not None else item.answer
        if not isinstance(pattern, str):
            raise ValueError("the row's answer is not a regular expression (data.answer_key)")
        text = item.response if self.options.with_thinking else after_thinking(item.response).strip()
        find = regex.fullmatch if self.options.whole else regex.search
        try:
            right = float(find(pattern, text, regex.DOTALL, timeout=LIMIT_S) is not None)
        except TimeoutError:
            return Score(0.0, 0.0, f"TimeoutError: the search took more than {LIMIT_S:g} s", ground_truth=pattern)
        return Score(right, right, ground_truth=pattern)


class JsonSchemaReward(PerResponse):
    """1 if the response or its last code block is JSON valid under the schema (option or row's answer), else 0."""

    def __init__(self, config: RewardConfig):
        self.options = read_options(JsonSchemaOptions, config.options)
        if self.options.json_schema is not None and (text := _problem_of_schema(self.options.json_schema)):
            raise ValueError(f"json_schema: {text}")

    def problem_of_row(self, answer: Any, extra: Mapping[str, Any]) -> str:
        """Reports an answer that is not a JSON schema."""
        if self.options.json_schema is not None:
            return ""
        return _problem_of_schema(_parsed(answer)[1] if isinstance(answer, str) else answer)

    def score_one(self, item: RewardItem) -> Score:
        from jsonschema.validators import validator_for

        schema = self.options.json_schema
        if schema is None:
            schema = _parsed(item.answer)[1] if isinstance(item.answer, str) else item.answer
            if text := _problem_of_schema(schema):
                raise ValueError(text)
        response = after_thinking(item.response).strip()
        blocks = CLOSED_BLOCK.findall(response)
        is_json, value = _parsed(blocks[-1] if blocks else response)
        try:
            valid = is_json and validator_for(schema)(schema).is_valid(value)
        except RecursionError:  # JSON nested too deeply under a recursive schema
            valid = False
        return Score(float(valid), float(valid), metrics={"is_json": float(is_json)})


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _parsed(text: str) -> tuple[bool, Any]:
    """(whether a text is JSON, its value)."""
    try:
        return True, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None


def _problem_of_schema(schema: Any) -> str:
    """Why this is not a JSON schema; empty if it is one. References to other documents (downloads) are refused."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    if not isinstance(schema, Mapping):
        return f"{str(schema)[:40]!r} is not a JSON schema, which is an object"
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        return f"not a JSON schema: {error.message}"
    if outside := [reference for reference in _references(schema) if not reference.startswith("#")]:
        return f"the JSON schema refers to {outside[0]!r}; only references within it (#/...) are followed"
    if missing := [reference for reference in _references(schema) if not _leads_somewhere(schema, reference)]:
        return f"the JSON schema refers to {missing[0]!r}, which does not exist in it"
    return ""


def _leads_somewhere(schema: Any, reference: str) -> bool:
    """Whether the target of a reference #/a/b exists; the validator checks other references (#, #anchor)."""
    at = schema
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(at, Mapping) and key in at:
            at = at[key]
        elif isinstance(at, list) and key.isdecimal() and int(key) < len(at):
            at = at[int(key)]
        else:
            return False
    return True


def _references(schema: Any) -> list[str]:
    if isinstance(schema, Mapping):
        own = [value for key, value in schema.items() if key in ("$ref", "$dynamicRef") and isinstance(value, str)]
        return own + [reference for value in schema.values() for reference in _references(value)]
    return [reference for value in schema for reference in _references(value)] if isinstance(schema, list) else []
