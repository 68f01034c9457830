"""Rows with a chosen and a rejected part: a prompt with two answers, as text or as messages, or two whole dialogues
with a common beginning (forms: docs/data.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hpcrl.config import DataConfig
from hpcrl.data.files import BadRow
from hpcrl.data.messages import ImagePart, Messages, listed, one_turn, read_messages
from hpcrl.data.pair_forms import (
    UselessPair,
    check_scores,
    common_beginning,
    spoken_dialogue,
    spoken_prompt,
    with_parts,
)
from hpcrl.data.rows import PROMPT_KEYS, RESPONSE_KEYS, RawContext, Row, columns_of, learning_obstacle, parse_row
from hpcrl.spec.media import IMAGE_MARK

COMPLETION = "completion"


@dataclass
class _Part:
    """The chosen or the rejected part: its messages, the same before they were read, and its images."""

    name: str
    messages: Messages
    given: list[Any]
    images: list[ImagePart]


def parse_pair(raw: dict[str, Any], context: RawContext) -> Row:
    """Read a raw row as parse_row() does: the row of the chosen part, with the other part as `rejected`. BadRow
    describes the error; it is a UselessPair if the parts are equal, tied, or empty."""
    config, where, padded = context.config, context.where, context.padded
    raw = with_parts(raw, config, where)
    names = (config.chosen_key, config.rejected_key)
    rest = {name: value for name, value in raw.items() if name not in (*names, *RESPONSE_KEYS)}
    key = next((key for key in _prompt_keys(config) if rest.get(key) is not None), None)
    values = [raw.get(name) for name in names]
    if key is not None:
        rest[key] = spoken_prompt(rest[key])
    elif all(isinstance(value, str) for value in values) and not spoken_dialogue(values[0]):
        chosen, rejected = map(str, values)
        if (beginning := common_beginning(chosen, rejected)) and not chosen.lstrip().startswith("["):
            key = config.prompt_key or "prompt"
            rest[key], values = beginning, [text[len(beginning) :] for text in (chosen, rejected)]
    parts = [_part(value, name, raw, config, where, padded) for value, name in zip(values, names, strict=True)]
    if any(part.messages[0]["role"] in ("system", "user") for part in parts):
        count = _common(parts, where)
        own, prompt = config.prompt_key or "prompt", parts[0].messages[:count]
        _check_prompt(rest.get(own), own, prompt, where, padded)
        rest[own] = parts[0].given[:count]
        parts = [_Part(part.name, part.messages[count:], part.given[count:], part.images) for part in parts]
    elif key is None:
        looked = ", ".join(_prompt_keys(config))
        raise BadRow(
            f"{where}: no prompt: {names[0]} and {names[1]} have only answers, and the row has none of {looked} "
            "(data.prompt_key)"
        )
    if _said(parts[0]) == _said(parts[1]):
        raise UselessPair(f"{where}: {names[0]} and {names[1]} are equal", "equal")
    check_scores(raw, where)
    rows = []
    for part in parts:
        if any(IMAGE_MARK in (message["content"] or "") for message in part.messages):
            raise BadRow(f"{where}: {part.name}: only a prompt may have images")
        row = parse_row({**rest, COMPLETION: part.messages}, context)
        row = replace(row, prompt_messages=len(row.messages) + 1 - len(part.messages))
        if obstacle := learning_obstacle(row):
            raise UselessPair(f"{where}: {part.name}: {obstacle}", "empty")
        rows.append(row)
    return replace(rows[0], rejected=rows[1])


def _prompt_keys(config: DataConfig) -> tuple[str, ...]:
    return (config.prompt_key,) if config.prompt_key else PROMPT_KEYS


def _part(value: Any, name: str, raw: dict[str, Any], config: DataConfig, where: str, padded: bool) -> _Part:
    """A part of a row; text is one turn of the assistant, or a whole dialogue."""
    if value is None:
        columns = f"{config.chosen_key} and {config.rejected_key} (data.chosen_key, data.rejected_key)"
        raise BadRow(f"{where}: no {name}: a pair has the columns {columns}; the row has {columns_of(raw)}")
    if isinstance(value, str) and not value.strip():
        raise UselessPair(f"{where}: {name} is empty", "empty")
    value = spoken_dialogue(value) or value
    images: list[ImagePart] = []
    messages = read_messages([value] if isinstance(value, dict) else value, where, name, padded, images)
    if isinstance(value, str) and messages == [{"role": "user", "content": value}]:
        messages = [one_turn(value)]
    if messages[-1]["role"] != "assistant":
        raise BadRow(f"{where}: {name} does not end with a message of the assistant")
    given = value if isinstance(value, list) else (isinstance(value, str) and listed(value)) or messages
    return _Part(name, messages, given, images)


def _common(parts: list[_Part], where: str) -> int:
    """The number of leading messages that both dialogues share."""
    chosen, rejected = (part.messages for part in parts)
    most = min(len(chosen), len(rejected)) - 1  # the last ones are answers
    count = next((n for n in range(most) if chosen[n] != rejected[n]), most)
    if not count or chosen[count - 1]["role"] not in ("user", "tool"):
        raise BadRow(
            f"{where}: {parts[0].name} and {parts[1].name} do not answer the same prompt: they first differ in message "
            f"{count}, which does not follow a user or tool message"
        )
    if [image.given for image in parts[0].images] != [image.given for image in parts[1].images]:
        raise BadRow(f"{where}: {parts[0].name} and {parts[1].name} have different images")
    return count


def _check_prompt(given: Any, key: str, prompt: Messages, where: str, padded: bool) -> None:
    """BadRow if the prompt column differs from the dialogues' prompt."""
    if given is None:
        return
    asked = (read_messages(given, where, key, padded, [])[-1]["content"] or "").strip()
    contents = [message["content"].strip() for message in prompt if message["role"] == "user"]
    if not any(asked in content or content in asked for content in contents):
        raise BadRow(f"{where}: {key} differs from the prompt with which chosen and rejected begin")


def _said(part: _Part) -> Messages:
    return [{**message, "content": (message["content"] or "").strip()} for message in part.messages]
