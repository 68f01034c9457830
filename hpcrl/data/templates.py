"""Renders a model folder's chat template without transformers, whose import takes seconds, so a launch can check rows
and show a prompt. The result equals transformers' apply_chat_template()."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

TEMPLATE_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\n\n' }}{%- endif %}
{{- '# Tools\n\nCall a function with <tool_call>{"name": ..., "arguments": {...}}</tool_call>.\n<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message['role'] == 'system') %}
{{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>' + ((call['function'] or call) | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""The chat template of tiny models."""
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_TEXT_ONLY = "(message['content'] or '') }}"
_PARTS = """'' }}
{%- if message['content'] is string %}{{- message['content'] }}{%- else %}
{%- for part in message['content'] or [] %}
{%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part['text'] }}{%- endif %}
{%- endfor %}
{%- endif %}"""
CHATML_WITH_IMAGES = CHATML.replace(_TEXT_ONLY, _PARTS)
"""The chat template of tiny models that take images."""


@dataclass(frozen=True, slots=True)
class Token:
    """An added token of a tokenizer."""

    content: str
    special: bool = True


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that are read; its vocabulary is skipped."""

    added_tokens: list[_Added] = []


@dataclass(eq=False)
class FolderTemplate:
    """A model folder's chat template and special tokens, with the attribute names of transformers' tokenizers, so
    render() accepts both. `special_tokens` maps roles, such as eos_token, to texts."""

    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str] = field(default_factory=dict)
    added_tokens_decoder: dict[int, Token] = field(default_factory=dict)

    @property
    def eos_token(self) -> str | None:
        """The end-of-sequence token."""
        return self.special_tokens.get("eos_token")

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        documents: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The rendered text. Raises the template's errors."""
        assert not tokenize, "a folder's template has no tokens"
        values = {"messages": messages, "tools": tools, "documents": documents, **self.special_tokens, **variables}
        return _compiled(self.text(bool(tools))).render(**values, add_generation_prompt=add_generation_prompt)

    def text(self, with_tools: bool) -> str:
        """The folder's template for messages with or without tools."""
        if isinstance(self.chat_template, str):
            return self.chat_template
        named = self.chat_template or {}
        return named["tool_use"] if with_tools and "tool_use" in named else named.get("default", "")

    def variables(self) -> set[str]:
        """Names of the variables that the template reads."""
        from jinja2 import meta

        texts = {self.text(True), self.text(False)} - {""}
        return {name for text in texts for name in meta.find_undeclared_variables(_environment().parse(text))}


def tiny_template(images: bool = False) -> FolderTemplate:
    """The template of tiny models."""
    texts = (PAD, START, END, *(IMAGE_TOKENS if images else ()))
    tokens = {number: Token(text) for number, text in enumerate(texts)}
    return FolderTemplate(CHATML_WITH_IMAGES if images else CHATML, {"eos_token": END, "pad_token": PAD}, tokens)


def read_template(folder: Path) -> FolderTemplate:
    """The template of a folder in HF layout; an empty one if the folder has none. ValueError if a file cannot be read,
    or if the template is invalid."""
    config = _read(folder / "tokenizer_config.json")
    mapped = {**_read(folder / "special_tokens_map.json"), **config}
    special = {name: text for name, value in mapped.items() if name.endswith("_token") and (text := _content(value))}
    found = FolderTemplate(_template(folder, config), special, _added_tokens(folder, config))
    if found.chat_template:
        try:
            found.variables()
        except Exception as error:  # jinja2's own errors, or too deep a recursion
            raise ValueError(f"the chat template of {folder} is not valid: {error}") from error
    return found


def _template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template as transformers finds it: files take precedence over tokenizer_config.json's entry."""
    named = {}
    if (file := folder / TEMPLATE_FILE).is_file():
        named["default"] = _text(file)
    named |= {file.stem: _text(file) for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    if named:
        return named["default"] if list(named) == ["default"] else named
    given = config.get("chat_template")
    if isinstance(given, list):
        return {str(entry["name"]): str(entry["template"]) for entry in given if isinstance(entry, dict)}
    return given if isinstance(given, str) else None


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, Token]:
    try:
        entries = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerFile).added_tokens
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        entries = []
    found = {entry.id: Token(entry.content, entry.special) for entry in entries}
    given = config.get("added_tokens_decoder")
    for number, entry in given.items() if isinstance(given, dict) else ():
        if number.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            found[int(number)] = Token(entry["content"], bool(entry.get("special")))
    return found


def _content(value: Any) -> str:
    """The text of a special token, given as text or as an object."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


@functools.cache
def _environment() -> Any:
    """A jinja2 environment configured as in transformers."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the model's text; it does not change any text."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

        def _shown(self, caller: Any) -> str:
            return str(caller())

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


@functools.lru_cache(maxsize=16)
def _compiled(text: str) -> Any:
    return _environment().from_string(text)
