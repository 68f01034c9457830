"""Rows with an answer and a label that says whether the answer is good (KTO), in TRL's unpaired form; a pair has one
answer of each label."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpcrl.config import DataConfig
from hpcrl.data.files import BadRow
from hpcrl.data.pair_forms import is_pair, spoken_prompt
from hpcrl.data.pairs import parse_pair
from hpcrl.data.rows import PROMPT_KEYS, RESPONSE_KEYS, RawContext, Row, columns_of, parse_row


def parse_labelled(raw: dict[str, Any], context: RawContext) -> Row:
    """Read a raw row as parse_row() does, with its `label`; a pair as parse_pair() does. Only the answer is trained on,
    which may have several turns in a column of messages. BadRow describes the error."""
    config = context.config
    if is_pair(raw, config):
        return parse_pair(raw, context)
    label = _label(raw, config, context.where)
    rest = {name: value for name, value in raw.items() if name != config.label_key}
    for key in (config.prompt_key,) if config.prompt_key else PROMPT_KEYS:
        if isinstance(rest.get(key), str):
            rest[key] = spoken_prompt(rest[key])
    row = parse_row(rest, context)
    written = next((rest[name] for name in RESPONSE_KEYS if rest.get(name)), None)
    num_turns = len(written) if isinstance(written, list) else 1
    return replace(row, label=label, prompt_messages=len(row.messages) + 1 - num_turns)


def _label(raw: dict[str, Any], config: DataConfig, where: str) -> bool:
    value = raw.get(key := config.label_key)
    if value is None:
        raise BadRow(
            f"{where}: no {key}: a labelled row says whether its answer is good (data.label_key), and a pair has "
            f"{config.chosen_key} and {config.rejected_key}; the row has {columns_of(raw)}"
        )
    if isinstance(value, int) and value in (0, 1):  # true and false are 1 and 0
        return bool(value)
    kind = "" if isinstance(value, int | float) else f" of type {type(value).__name__}"
    raise BadRow(f"{where}: {key} must be true or false, or the integers 1 or 0, not {str(value)[:40]!r}{kind}")
