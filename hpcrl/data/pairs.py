"""Rows with a chosen and a rejected part, in TRL's forms: a prompt with two answers, as text or as messages, or two
whole dialogues with a common beginning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcrl.config import DataConfig
from hpcrl.data.files import BadRow
from hpcrl.data.messages import Messages, one_turn, read_messages
from hpcrl.data.rows import PROMPT_KEYS, RESPONSE_KEYS, Row, learning_obstacle, parse_row

PARTS = ("chosen", "rejected")
COMPLETION = "completion"


def parse_pair(
    raw: dict[str, Any],
    config: DataConfig,
    fixed_domain: str | None,
    where: str,
    padded: bool = False,
    folder: Path = Path(),
) -> Row:
    """Read a raw row as parse_row() does: the row of the chosen part, with the other part as `rejected`. BadRow
    describes the error."""
    parts = [_part(raw, name, where, padded) for name in PARTS]
    rest = {name: value for name, value in raw.items() if name not in (*PARTS, *RESPONSE_KEYS)}
    if any(part[0]["role"] in ("system", "user") for part in parts):
        count = _common(parts, where)
        key, prompt = config.prompt_key or "prompt", parts[0][:count]
        _check_prompt(rest.get(key), key, prompt, where, padded)
        rest[key] = prompt
        parts = [part[count:] for part in parts]
    elif not any(rest.get(key) is not None for key in ([config.prompt_key] if config.prompt_key else PROMPT_KEYS)):
        looked = config.prompt_key or ", ".join(PROMPT_KEYS)
        raise BadRow(
            f"{where}: no prompt: chosen and rejected have only answers, and the row has none of {looked} "
            "(data.prompt_key)"
        )
    if _said(parts[0]) == _said(parts[1]):
        raise BadRow(f"{where}: chosen and rejected are equal")
    chosen, rejected = (
        parse_row({**rest, COMPLETION: part}, config, fixed_domain, where, padded, folder) for part in parts
    )
    chosen, rejected = (
        replace(row, prompt_messages=len(row.messages) + 1 - len(part))
        for row, part in zip((chosen, rejected), parts, strict=True)
    )
    for name, row in zip(PARTS, (chosen, rejected), strict=True):
        if obstacle := learning_obstacle(row):
            raise BadRow(f"{where}: {name}: {obstacle}")
    return replace(chosen, rejected=rejected)


def _part(raw: dict[str, Any], name: str, where: str, padded: bool) -> Messages:
    """The messages of a part; text is one turn of the assistant."""
    value = raw.get(name)
    if value is None:
        raise BadRow(
            f"{where}: no {name}: a row of a pair has the columns chosen and rejected; the row has {', '.join(raw)}"
        )
    messages = read_messages([value] if isinstance(value, dict) else value, where, name, padded)
    if isinstance(value, str) and messages == [{"role": "user", "content": value}]:
        messages = [one_turn(value)]
    if messages[-1]["role"] != "assistant":
        raise BadRow(f"{where}: {name} does not end with a message of the assistant")
    return messages


def _common(parts: list[Messages], where: str) -> int:
    """The number of leading messages that both dialogues share."""
    most = min(map(len, parts)) - 1  # the last ones are answers
    count = next((n for n in range(most) if parts[0][n] != parts[1][n]), most)
    if not count or parts[0][count - 1]["role"] not in ("user", "tool"):
        raise BadRow(
            f"{where}: chosen and rejected do not answer the same prompt: they first differ in message {count}, "
            "which does not follow a user or tool message"
        )
    return count


def _check_prompt(given: Any, key: str, prompt: Messages, where: str, padded: bool) -> None:
    """BadRow if the prompt column differs from the dialogues' prompt."""
    if given is None:
        return
    asked = (read_messages(given, where, key, padded)[-1]["content"] or "").strip()
    contents = [message["content"].strip() for message in prompt if message["role"] == "user"]
    if not any(asked in content or content in asked for content in contents):
        raise BadRow(f"{where}: {key} differs from the prompt with which chosen and rejected begin")


def _said(messages: Messages) -> Messages:
    return [{**message, "content": (message["content"] or "").strip()} for message in messages]
