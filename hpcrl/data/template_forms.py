"""Detects the forms of content that a chat template shows, and converts messages to these forms.

Templates differ in whether they show tools, calls and results, and in the forms that they require. Content that a
template would silently omit is converted to a form that it shows, or refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from typing import Any

from hpcrl.data.messages import Messages
from hpcrl.spec.media import IMAGE_MARK

Tools = list[dict[str, Any]]
VARIABLES = "chat_template_variables"
"""Attribute of a tokenizer: variables that render() always passes to its chat template."""
TEXT, CALLED, RESULT = "0TEXT0", "0CALLED0", "0RESULT0"
"""Placeholders for texts of a message; letters and digits, which no template trims or escapes."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": CALLED,
        "description": CALLED,
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "x"}},
            "required": ["x"],
        },
    },
}
ASKED = {"role": "user", "content": "0"}
DESCRIPTION = """\
You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>
For each call, write a JSON object with the name of the function and its arguments within <tool_call></tool_call>:
<tool_call>
{"name": <name of the function>, "arguments": <object of its arguments>}
</tool_call>"""
"""Description of tools for a model whose chat template does not show them, in Hermes' form."""


class TemplateRefusal(ValueError):
    """The chat template cannot render the messages; `reason` is why."""

    def __init__(self, reason: str):
        super().__init__(f"the chat template refuses the messages: {reason}")
        self.reason = reason


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's chat template, the one for tools if there are several; empty without one."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else template.get("tool_use") or template.get("default", "")


def apply_template(tokenizer: Any, messages: Messages, tools: Tools | None, ask: bool, **variables: Any) -> str:
    """The text that the template renders. TemplateRefusal for any error: a template is a program."""
    given = getattr(tokenizer, VARIABLES, {}) | variables
    how = given | {"tools": tools, "tokenize": False, "add_generation_prompt": ask}
    try:
        return str(tokenizer.apply_chat_template(messages, **how))
    except Exception as error:
        raise TemplateRefusal(" ".join(f"{type(error).__name__}: {error}".split())) from error


def as_taken(tokenizer: Any, messages: Messages, tools: Tools | None) -> tuple[Messages, Tools | None]:
    """Messages and tools in the forms that the template shows. TemplateRefusal if there are tool calls but the template
    shows none.

    - Tools that it does not show are described in the first user message (Gemma 2, Phi-3).
    - Tool results that it does not show become a user message; consecutive results become one message.
    - Call arguments become JSON text (DeepSeek-V3); a text becomes a list of one part (SmolVLM), or of parts with its
      images; without them if the template shows no images.
    """
    key = chat_template(tokenizer)
    if tools and not _shows_tools(tokenizer, key):
        messages, tools = _described(messages, tools), None
    if any(message.get("tool_calls") for message in messages):
        messages = [
            _with_calls(tokenizer, key, message) if message.get("tool_calls") else message for message in messages
        ]
    if any(message["role"] == "tool" for message in messages):
        messages = _with_results(tokenizer, messages)
    if any(IMAGE_MARK in (message.get("content") or "") for message in messages):
        split = _in_parts if _shows_images(tokenizer, key) else _without_images
        messages = [split(message) if IMAGE_MARK in (message.get("content") or "") else message for message in messages]
    if _wants_parts(tokenizer, key):
        messages = [_in_parts(message) if isinstance(message.get("content"), str) else message for message in messages]
    return messages, tools


def shows_images(tokenizer: Any) -> bool:
    """Whether the chat template writes anything for an image."""
    return _shows_images(tokenizer, chat_template(tokenizer))


def shows_results(tokenizer: Any, results: Messages, called: bool) -> bool:
    """Whether the template shows these tool results after a turn, which has tool calls if `called` and otherwise only
    text."""
    keys = tuple(sorted({key for message in results for key in message}))
    return _shows_results(tokenizer, chat_template(tokenizer), keys, called)


def _shown(tokenizer: Any, messages: Messages, tools: Tools | None, *texts: str) -> bool:
    """Whether the texts are in the template's output."""
    try:
        text = apply_template(tokenizer, [ASKED, *messages], tools, ask=True)
    except TemplateRefusal:
        return False
    return all(wanted in text for wanted in texts)


@functools.lru_cache(maxsize=16)
def _shows_tools(tokenizer: Any, template: str) -> bool:
    return _shown(tokenizer, [], [TOOL], CALLED)


@functools.lru_cache(maxsize=16)
def _wants_parts(tokenizer: Any, template: str) -> bool:
    """Whether a text is only shown as a list of one part."""
    said = {"role": "user", "content": TEXT}
    try:
        if TEXT in apply_template(tokenizer, [said], None, ask=True):
            return False
        return TEXT in apply_template(tokenizer, [_in_parts(said)], None, ask=True)
    except TemplateRefusal:
        return False


@functools.lru_cache(maxsize=16)
def _shows_images(tokenizer: Any, template: str) -> bool:
    said = {"role": "user", "content": TEXT}
    try:
        with_image = apply_template(tokenizer, [_in_parts({**said, "content": IMAGE_MARK + TEXT})], None, ask=True)
        return TEXT in with_image and with_image != apply_template(tokenizer, [_in_parts(said)], None, ask=True)
    except TemplateRefusal:
        return False


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a list of parts, divided where images are."""
    texts = message["content"].split(IMAGE_MARK)
    parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}] if texts[0] or len(texts) == 1 else []
    for text in texts[1:]:
        parts += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
    return {**message, "content": parts}


def _without_images(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": message["content"].replace(IMAGE_MARK, "")}


@functools.lru_cache(maxsize=16)
def _form_of_calls(tokenizer: Any, template: str) -> tuple[str | None, bool] | None:
    """(content of a turn that has only calls, whether arguments are text); None if the template shows no calls."""
    result = {"role": "tool", "name": CALLED, "tool_call_id": "call00000", "content": RESULT}
    forms = list(itertools.product((None, ""), (False, True)))
    tools = [TOOL] if _shows_tools(tokenizer, template) else None
    shown: dict[tuple[str | None, bool], list[str]] = {form: [] for form in forms}
    for form, later in itertools.product(forms, ([], [result])):
        with contextlib.suppress(TemplateRefusal):
            messages = [ASKED, _written(_one_call(), *form), *later]
            if TEXT in (text := apply_template(tokenizer, messages, tools, ask=bool(later))):
                shown[form].append(text)
    # Faults that raise no error: a Python repr instead of JSON, or the text "None".
    faults = {form: sum(text.count("None") + (f"'{TEXT}'" in text) for text in shown[form]) for form in forms}
    best = min(forms, key=lambda form: (-len(shown[form]), faults[form]))
    return best if shown[best] else None


def _one_call() -> dict[str, Any]:
    function = {"name": CALLED, "arguments": {"x": TEXT}}
    return {"role": "assistant", "content": None, "tool_calls": [_call(function)]}


def _call(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "id": "call00000", "function": function}


def _with_calls(tokenizer: Any, template: str, message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    if (form := _form_of_calls(tokenizer, template)) is None:
        raise TemplateRefusal("its output contains no tool calls")
    return _written(message, *form)


def _written(message: dict[str, Any], content: str | None, as_text: bool) -> dict[str, Any]:
    """A turn with calls: `content` instead of an empty content, arguments as JSON text or as objects."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        changed = {**function, "arguments": arguments}
        calls.append({**call, "function": changed} if "function" in call else changed)
    return {**message, "content": message.get("content") or content, "tool_calls": calls}


@functools.lru_cache(maxsize=64)
def _shows_results(tokenizer: Any, template: str, keys: tuple[str, ...], called: bool) -> bool:
    known = {"role": "tool", "content": RESULT, "name": CALLED, "tool_call_id": "call00000"}
    result = {key: known.get(key, "") for key in keys}
    if not called:
        return _shown(tokenizer, [{"role": "assistant", "content": TEXT}, result], None, TEXT, RESULT)
    form = _form_of_calls(tokenizer, template)
    tools = [TOOL] if _shows_tools(tokenizer, template) else None
    return form is not None and _shown(tokenizer, [_written(_one_call(), *form), result], tools, TEXT, RESULT)


def _with_results(tokenizer: Any, messages: Messages) -> Messages:
    found: Messages = []
    called = told = False
    for results, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        some = list(group)
        if told and some[0]["role"] == "user":  # some templates refuse two user messages in a row
            some[0] = {**some[0], "content": f"{found.pop()['content']}\n\n{some[0]['content']}"}
        if told := results and not shows_results(tokenizer, some, called):
            texts = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in some]
            some = [{"role": "user", "content": "\n".join(texts)}]
        called = bool(some[-1].get("tool_calls"))
        found += some
    return found


def _described(messages: Messages, tools: Tools) -> Messages:
    """The messages with the tools before the text of the first user message, or else of the first message."""
    lines = "\n".join(json.dumps(tool) for tool in tools)
    place = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
    told = {**messages[place], "content": f"{DESCRIPTION.replace('{tools}', lines)}\n\n{messages[place]['content']}"}
    return [*messages[:place], told, *messages[place + 1 :]]
