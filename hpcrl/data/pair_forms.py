"""Converts published forms of pairs to columns with the prompt and the two parts: dialogues in one text (hh-rlhf),
texts with a common beginning (TRL), two responses with a preference (HelpSteer), prompt and parts within one column
(RLHF-V)."""

from __future__ import annotations

import itertools
import re
from typing import Any

import msgspec

from hpcrl.config import DataConfig
from hpcrl.data.files import BadRow
from hpcrl.data.messages import Messages, one_turn
from hpcrl.data.rows import PROMPT_KEYS

SPOKEN = re.compile(r"\n\n(Human|Assistant):")
"""How a turn begins in a text that is a whole dialogue."""
RESPONSES = (("response1", "response2"), ("response_1", "response_2"))
PREFERENCES = ("overall_preference", "preference_strength")
"""Columns of HelpSteer: below 0 the first response is better, above 0 the second."""
WHOLE = "text"
"""Column of RLHF-V: the JSON text of an object with question, chosen and rejected."""
SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen_rating", "rejected_rating"))
"""Columns with the scores of both parts: UltraFeedback binarized, OpenRLHF, Tulu 3."""

LARGEST = 1e18
"""Of a score or a margin: its square is finite in float32."""


class UselessPair(BadRow):
    """A well-formed pair of which nothing can be learned.

    Attributes:
        kind: equal, tied, reversed or empty.
    """

    def __init__(self, message: str, kind: str):
        super().__init__(message)
        self.kind = kind


def is_pair(raw: dict[str, Any], config: DataConfig) -> bool:
    """Whether a raw row has the columns of a pair."""
    named = any(raw.get(key) is not None for key in (config.chosen_key, config.rejected_key))
    return named or _compared(raw) or bool(_within(raw))


def with_parts(raw: dict[str, Any], config: DataConfig, where: str) -> dict[str, Any]:
    """The row, in HelpSteer's and RLHF-V's forms with the columns of the chosen and the rejected part. UselessPair if
    the responses are tied."""
    if raw.get(config.chosen_key) is not None:
        return raw
    if parts := _within(raw):  # its answers are to its question, whatever a column beside it asks
        rest = {name: value for name, value in raw.items() if name != WHOLE and name not in PROMPT_KEYS}
        given = {config.chosen_key: parts["chosen"], config.rejected_key: parts["rejected"]}
        return {**rest, config.prompt_key or "question": parts["question"], **given}
    if not _compared(raw):
        return raw
    responses = next(names for names in RESPONSES if all(name in raw for name in names))
    column = next(name for name in PREFERENCES if name in raw)
    preference = number(raw[column])
    if preference is None:
        raise BadRow(f"{where}: {column} must be a number, not {str(raw[column])[:40]!r}")
    if preference == 0:
        raise UselessPair(f"{where}: the responses are tied ({column} is 0)", "tied")
    better, worse = responses if preference < 0 else reversed(responses)
    rest = {name: value for name, value in raw.items() if name not in (*responses, config.rejected_key)}
    if config.prompt_key is None and rest.get("prompt") is None and rest.get("context") is not None:
        rest["prompt"] = rest.pop("context")
    return {**rest, config.chosen_key: raw[better], config.rejected_key: raw[worse]}


def _compared(raw: dict[str, Any]) -> bool:
    """Whether a row has HelpSteer's columns."""
    return any(all(name in raw for name in names) for names in RESPONSES) and any(name in raw for name in PREFERENCES)


def _within(raw: dict[str, Any]) -> dict[str, Any]:
    """The pair in the column WHOLE; empty if there is none."""
    found = raw.get(WHOLE)
    if isinstance(found, str) and found.lstrip().startswith("{"):
        try:
            found = msgspec.json.decode(found)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return {}
    names = ("question", "chosen", "rejected")
    return found if isinstance(found, dict) and all(found.get(name) is not None for name in names) else {}


def check_scores(raw: dict[str, Any], where: str) -> None:
    """UselessPair if the row's own scores do not put the chosen part above the rejected one."""
    for names in SCORES:
        chosen, rejected = (number(raw.get(name)) for name in names)
        if chosen is None or rejected is None:
            continue
        if chosen == rejected:
            raise UselessPair(f"{where}: chosen and rejected are tied ({' and '.join(names)} are {chosen:g})", "tied")
        if chosen < rejected:
            text = f"{names[0]} is {chosen:g}, below {names[1]}, which is {rejected:g}"
            raise UselessPair(f"{where}: {text}", "reversed")


def number(value: Any) -> float | None:
    """A number of a row, at most LARGEST in size; None for any other value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= LARGEST else None


def spoken_dialogue(value: Any) -> Messages | None:
    """The messages of a text such as "\\n\\nHuman: 2+2?\\n\\nAssistant: 4"; None for any other value. A turn of the
    assistant at the end of a prompt is empty."""
    text = f"\n\n{value.lstrip()}" if isinstance(value, str) else ""
    if not text.startswith("\n\nHuman:") or "\n\nAssistant:" not in text:
        return None
    _, *pieces = SPOKEN.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    said = zip(pieces[::2], pieces[1::2], strict=True)
    return [{"role": roles[speaker], "content": content.strip()} for speaker, content in said]


def spoken_prompt(value: Any) -> Any:
    """A prompt, as messages if it is a dialogue in one text; unchanged otherwise."""
    messages = spoken_dialogue(value)
    if messages and messages[-1] == one_turn(""):
        return messages[:-1]
    return messages or value


def common_beginning(chosen: str, rejected: str) -> str:
    """The text with which both begin, up to the white space before the first word that differs."""
    count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    return re.sub(r"\S*$", "", chosen[:count]).rstrip()
