"""Messages of samples for a page: texts of models, which may have any content and length, in a bounded size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpcrl.spec.media import WRITTEN_MARK

HEAD_SHARE = 0.7
"""Share of a long text's beginning in what is shown of it; the rest is its end, where answers are."""
KNOWN_KEYS = {"role", "content", "name", "images"}


def clean(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def cut(text: str, limit: int) -> dict[str, Any]:
    """{"text"} of at most `limit` characters; of a longer text {"text", "left_out", "tail"} with its beginning, the
    number of characters that are left out, and its end."""
    text = clean(text)
    if len(text) <= limit:
        return {"text": text}
    head = int(limit * HEAD_SHARE)
    return {"text": text[:head], "left_out": len(text) - limit, "tail": text[len(text) - (limit - head) :]}


def num_bytes(value: Any) -> int:
    """Bytes of the value as JSON in a page: ASCII only, `<` in six bytes."""
    text = json.dumps(value, separators=(",", ":"))
    return len(text) + 5 * text.count("<")


def as_messages(value: Any, role: str) -> list[dict[str, Any]]:
    """A list of messages, from such a list or from a text, which gets this role; other values are shown as JSON."""
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return [dict(message) for message in value]
    return [{"role": role, "content": value if isinstance(value, str) else json.dumps(value)}]


def message(said: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """A chat message for the page: role, cut text, and, if it has any, `name` and `extra`: other keys, such as tool
    calls, as JSON."""
    content = said.get("content")
    found = {"role": clean(str(said.get("role", "")))[:40], **cut(_text(content), limit)}
    if said.get("name"):
        found["name"] = clean(str(said["name"]))[:80]
    if extra := {key: value for key, value in said.items() if key not in KNOWN_KEYS and value}:
        found["extra"] = cut(json.dumps(extra, ensure_ascii=False, indent=1, default=str), limit)
    return found


def _text(content: Any) -> str:
    """The text of a message's content: a string, or parts in OpenAI's form."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return "".join(str(part["text"]) if "text" in part else _of_part(part) for part in content)
    return json.dumps(content, ensure_ascii=False, default=str)


def _of_part(part: Mapping[str, Any]) -> str:
    is_image = "image" in str(part.get("type", ""))
    return WRITTEN_MARK if is_image else json.dumps(part, ensure_ascii=False, default=str)
