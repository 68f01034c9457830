"""Converts a row's messages and tools from the forms of published data sets to one form: OpenAI's, with call arguments
as objects and without the nulls that Arrow writes for absent keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from hpcrl.data.files import IMAGE_COLUMNS, BadRow
from hpcrl.spec.media import IMAGE_MARK, WRITTEN_MARK

Messages = list[dict[str, Any]]

ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {"developer": "system", "function": "tool"}
"""OpenAI's name of a role -> its name in chat templates."""
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    **{role: role for role in ROLES},
}
"""`from` of a ShareGPT turn -> role. A function_call is an assistant turn whose text is one call, or a list of them."""
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image", "image_url", "input_image")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant turn that hold its reasoning."""
EXAMPLES = ("default", "const", "example", "enum", "examples")
"""Keywords of JSON schema whose values may be null, or hold null."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in messages, for whose place its message has an IMAGE_MARK.

    Args:
        given: A path, an address, a file's bytes, or an object with one of them; None: the next image of the column.
        place: Where it was found, for errors.
    """

    given: Any
    place: str


def read_messages(
    value: Any, where: str, key: str, padded: bool = False, images: list[ImagePart] | None = None
) -> Messages:
    """The messages of column `key`: text is one user message, a JSON list of messages is parsed. BadRow names the
    invalid message.

    Args:
        padded: Whether absent keys are null (Arrow).
        images: Gets the images in the order of their marks; None: an image is an error.
    """
    if isinstance(value, str):
        if not value.strip():
            raise BadRow(f"{where}: {key} is empty")
        value = listed(value) or [{"role": "user", "content": value}]
    if value == []:
        raise BadRow(f"{where}: {key} is empty")
    if not isinstance(value, list):
        raise BadRow(f"{where}: {key} must be text or a list of messages, not {type(value).__name__}")
    padded = padded or _is_padded(value)
    return [_message(message, f"{where}: {key}[{n}]", padded, images) for n, message in enumerate(value)]


def mark_images(text: str, count: int, place: str) -> str:
    """The text with IMAGE_MARKs for `count` images of its row or message: where it has `<image>`, or else at its start.
    BadRow if the numbers differ."""
    written = text.count(WRITTEN_MARK)
    if not written:
        return IMAGE_MARK * count + text
    if written != count:
        raise BadRow(f"{place}: {written} {WRITTEN_MARK} marks and {count} images")
    return text.replace(WRITTEN_MARK, IMAGE_MARK)


def read_tools(value: Any, where: str, padded: bool = False) -> list[dict[str, Any]] | None:
    """A row's tools, also from JSON text; None if there are none. BadRow if they are not a list of objects."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    tools = _from_json(value) if isinstance(value, str) else value
    tools = [_from_json(tool) if isinstance(tool, str) else tool for tool in tools] if isinstance(tools, list) else None
    if tools is None or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"{where}: tools must be a list of objects, or such a list as JSON text")
    return [_schema(tool, padded) for tool in tools] or None


def one_turn(text: str) -> dict[str, Any]:
    """An assistant turn."""
    return {"role": "assistant", "content": text}


def listed(text: str) -> Messages | None:
    """The messages in a JSON text (ROLL), None for any other text."""
    found = _from_json(text) if text.lstrip().startswith("[") else None
    is_list = isinstance(found, list) and all(isinstance(m, dict) and ("role" in m or "from" in m) for m in found)
    return found if is_list and found else None


def _from_json(text: str) -> Any:
    """The value of a JSON text; None for any other text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None


def _is_padded(messages: list[Any]) -> bool:
    """Whether the messages look like an export from Arrow, in which each has all keys, null for absent ones."""
    keys = [message.keys() for message in messages if isinstance(message, dict)]
    return any(m.get("tool_calls", 0) is None for m in messages if isinstance(m, dict)) and all(
        mine == keys[0] for mine in keys
    )


def _message(message: Any, place: str, padded: bool, images: list[ImagePart] | None) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRow(f"{place} must be an object with role and content, not {str(message)[:40]!r}")
    message = {name: value for name, value in message.items() if value is not None or name == "content"}
    if "from" in message and "role" not in message:
        message = _speaker(message, place)
    role = message.get("role")
    role = OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise BadRow(f"{place}.role must be one of {', '.join(ROLES)}, not {str(role)[:40]!r}")
    message["role"] = role
    message.setdefault("content", None)
    if isinstance(message["content"], str):
        message["content"] = message["content"].replace(IMAGE_MARK, "")
    elif isinstance(message["content"], list):
        message["content"] = _text(message["content"], place, images)
    for name in IMAGE_COLUMNS:
        if given := message.pop(name, None):
            parts = [ImagePart(each, f"{place}.{name}[{n}]") for n, each in enumerate(_as_list(given))]
            if IMAGE_MARK in (message["content"] or ""):
                raise BadRow(f"{place} has images in its content and in {name}, whose order is unknown")
            _require_images_allowed(images, parts[0].place).extend(parts)
            message["content"] = mark_images(message["content"] or "", len(parts), place)
    if call := message.pop("function_call", None):  # before OpenAI had tool_calls
        message["tool_calls"] = [{"type": "function", "function": call}]
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], f"{place}.tool_calls", padded)
        if not message["tool_calls"]:
            del message["tool_calls"]
    content = message.get("content")
    if not isinstance(content, str) and not (role == "assistant" and content is None and "tool_calls" in message):
        raise BadRow(f"{place}.content must be text")
    if role == "user" and not message["content"].strip():
        raise BadRow(f"{place}.content is empty")
    for name in THOUGHTS:
        if not isinstance(message.get(name, ""), str):
            raise BadRow(f"{place}.{name} must be text")
    return message


def _speaker(turn: dict[str, Any], place: str) -> dict[str, Any]:
    """A ShareGPT turn with OpenAI's keys."""
    speaker, value = turn.pop("from"), turn.pop("value", None)
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadRow(f"{place}.from must be one of {', '.join(SPEAKERS)}, not {str(speaker)[:40]!r}")
    if speaker != "function_call":
        return {**turn, "role": role, "content": value}
    calls = _from_json(value) if isinstance(value, str) else value
    if not isinstance(calls, dict | list):
        raise BadRow(f"{place}.value of a function_call must be the JSON of a call, or of a list of calls")
    return {**turn, "role": role, "content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}


def _text(parts: list[Any], place: str, images: list[ImagePart] | None) -> str:
    """The text of a content that is a list of parts: texts one line each as in vLLM, images as their marks."""
    found = ""
    for n, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind in IMAGE_PARTS and isinstance(part, dict):
            at = f"{place}.content[{n}]"
            _require_images_allowed(images, at).append(ImagePart(_given_in(part), at))
            found += IMAGE_MARK
            continue
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise BadRow(
                f"{place}.content[{n}] must be a part with text or an image, not one of type {str(kind)[:40]!r}"
            )
        text = text.replace(IMAGE_MARK, "")
        found += text if not n or found.endswith(IMAGE_MARK) else f"\n{text}"
    return found


def _given_in(part: dict[str, Any]) -> Any:
    """The image of a part in OpenAI's, transformers' or Qwen's form; None in a part without one."""
    given = next((part[name] for name in (*IMAGE_PARTS, "url", "path", "base64", "bytes") if part.get(name)), None)
    if isinstance(given, dict) and "url" in given:
        return given["url"]
    return given if given is None or not part.get("base64") else f"data:image;base64,{given}"


def _require_images_allowed(images: list[ImagePart] | None, place: str) -> list[ImagePart]:
    if images is None:
        raise BadRow(f"{place}: only a prompt may have images")
    return images


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _calls(calls: Any, place: str, padded: bool) -> list[dict[str, Any]]:
    """The calls of a turn, each {type, function: {name, arguments: {...}}, ...}."""
    if isinstance(calls, str):
        calls = _from_json(calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRow(f"{place} must be a list of objects")
    found = []
    for n, call in enumerate(calls):
        call = {name: value for name, value in call.items() if value is not None}
        if "function" not in call and "name" in call:
            call = {"type": "function", "function": call}
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{place}[{n}].function needs a name")
        known = {name: value for name, value in function.items() if value is not None}
        arguments = _arguments(known.get("arguments", {}), f"{place}[{n}].function.arguments", padded)
        found.append({**call, "function": {**known, "arguments": arguments}})
    return found


def _arguments(value: Any, place: str, padded: bool) -> dict[str, Any]:
    """The arguments of a call. A null in JSON text is an argument; in a padded structure it is an absent key."""
    if isinstance(value, str):
        arguments = _from_json(value) if value.strip() else {}
        if not isinstance(arguments, dict):
            raise BadRow(f"{place} must be an object or the JSON text of one, not {value[:40]!r}")
        return arguments
    if not isinstance(value, dict):
        raise BadRow(f"{place} must be an object or the JSON text of one, not {str(value)[:40]!r}")
    return _without_nulls(value) if padded else value


def _without_nulls(value: Any) -> Any:
    """A nested value without keys that are null; elements of lists are kept."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _schema(value: Any, padded: bool, named: bool = False) -> Any:
    """A tool's description without keys that are null, except example values (EXAMPLES) if not `padded`. If `named`,
    the keys are parameter names, not keywords."""
    if isinstance(value, list):
        return [_schema(inner, padded) for inner in value]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for key, inner in value.items():
        if key in EXAMPLES and not named and not padded:
            kept[key] = inner
        elif inner is not None:
            kept[key] = _schema(inner, padded, key == "properties" and not named)
    return kept
