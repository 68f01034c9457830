"""From messages to token ids, through the tokenizer's chat template if it has one.

Only the template writes special tokens: `<|im_end|>` in a message, a tool call or a tool is encoded as plain text,
since it would otherwise end the message. Without a template, the prompt is the text itself, including any special
tokens.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from hpcrl.data.messages import Messages
from hpcrl.data.template_forms import VARIABLES, TemplateRefusal, apply_template, as_taken
from hpcrl.models.vision import Vision
from hpcrl.spec.media import IMAGE_MARK

CONTENT = "0CONTENT0"
"""Placeholder for the model's text; letters and digits, which no template trims or escapes."""
VISION = "hpcrl_vision"
"""Attribute of a tokenizer: the image properties of its model, or None."""
MARK = "\ue000"  # private use area; inserted after the first character of text that looks like a special token


def render(
    tokenizer: Any, messages: Messages, tools: list[dict[str, Any]] | None, ask: bool = True, **variables: Any
) -> str:
    """The text of messages, for encode(); with `ask` it ends where the model's answer starts. Content that the template
    would silently omit is written in another form (as_taken). Without a chat template, each content is a paragraph.
    Special tokens in messages and tools contain a MARK, which plain() removes. `variables` of the template, such as
    enable_thinking, override bind()'s variables. TemplateRefusal if the template raises any error, or would omit tool
    calls."""
    if getattr(tokenizer, "chat_template", None):
        messages, tools = as_taken(tokenizer, messages, tools)
        return apply_template(tokenizer, marked(tokenizer, messages), marked(tokenizer, tools), ask, **variables)
    return "\n\n".join((message["content"] or "").replace(IMAGE_MARK, "") for message in messages)


def bind(tokenizer: Any, variables: dict[str, Any], vision: Vision | None = None) -> Any:
    """The tokenizer, with variables that render() always passes to its chat template (data.chat_template_kwargs), and
    with the image properties of its model (hpcrl.data.image_tokens)."""
    setattr(tokenizer, VARIABLES, variables)
    setattr(tokenizer, VISION, vision)
    return tokenizer


@functools.lru_cache(maxsize=8)
def end_of_turn(tokenizer: Any) -> str | None:
    """The added token with which the chat template ends a model turn; None if it writes none, or without a template."""
    turn = [{"role": "user", "content": "0"}, {"role": "assistant", "content": CONTENT}]
    try:
        after = render(tokenizer, turn, None, ask=False).partition(CONTENT)[2].lstrip()
    except TemplateRefusal:  # then no row can be rendered either
        return None
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    ends = (token.content for token in added if token.content.strip() and after.startswith(token.content))
    return max(ends, key=len, default=None)


def end_ids(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response according to tokenizer and chat template, which the model folder's generation
    config may lack: a base model's tokenizer and config have <|endoftext|>, but its template <|im_end|>."""
    text = end_of_turn(tokenizer)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = [tokenizer.eos_token_id, *(number for number, token in added.items() if token.content == text)]
    return tuple(dict.fromkeys(number for number in ids if number is not None))


def marked(tokenizer: Any, value: Any) -> Any:
    """A row's value with a MARK in every special token of its texts, including keys and nested values, so encode()
    encodes these tokens as plain text; unchanged without a chat template."""
    special = _special(tokenizer) if getattr(tokenizer, "chat_template", None) else None
    if special is None:
        return value

    def mark(value: Any) -> Any:
        match value:
            case str():
                # A MARK in the row itself could hide a special token until plain() removes it.
                return special.sub(lambda found: found[0][0] + MARK + found[0][1:], plain(value))
            case dict():
                return {mark(key): mark(entry) for key, entry in value.items()}
            case list():
                return [mark(entry) for entry in value]
        return value

    return mark(value)


def plain(text: str) -> str:
    """A rendered text without marks."""
    return text.replace(MARK, "")


def encode(tokenizer: Any, text: str, begins: bool = True) -> list[int]:
    """Token ids of a rendered text. Without a template, the tokenizer adds special tokens at the start of the text."""
    templated = bool(getattr(tokenizer, "chat_template", None))
    if not templated or MARK not in text or (special := _special(tokenizer)) is None:
        return list(tokenizer(text, add_special_tokens=begins and not templated)["input_ids"]) if text else []
    marked = "|".join(re.escape(token[0] + MARK + token[1:]) for token in special_tokens(tokenizer))
    ids: list[int] = []
    for piece in re.split(f"({marked})", text):
        words = plain(piece)
        as_text = piece != words and special.fullmatch(words) is not None
        ids += tokenizer(words, add_special_tokens=False, split_special_tokens=as_text)["input_ids"] if words else []
    return ids


@functools.lru_cache(maxsize=8)
def special_tokens(tokenizer: Any) -> list[str]:
    """The texts of the control tokens, longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return sorted((token.content for token in added if token.special), key=len, reverse=True)


@functools.lru_cache(maxsize=8)
def _special(tokenizer: Any) -> re.Pattern[str] | None:
    """A pattern that matches special tokens; None if there are none."""
    tokens = special_tokens(tokenizer)
    return re.compile("|".join(map(re.escape, tokens))) if tokens else None


def cut_to_fit(
    tokenizer: Any, messages: Messages, tools: list[dict[str, Any]] | None, max_tokens: int, **variables: Any
) -> tuple[str, list[int]] | None:
    """(text, token ids) of at most `max_tokens`, after cutting the last message's start. The template, the other
    messages and the last message's images and end (usually the question) are kept; None if these are too long."""
    content = messages[-1]["content"]

    def attempt(kept: int) -> tuple[str, list[int]]:
        end = content[len(content) - kept :]
        images = IMAGE_MARK * (content.count(IMAGE_MARK) - end.count(IMAGE_MARK))
        last = {**messages[-1], "content": images + end}
        text = render(tokenizer, [*messages[:-1], last], tools, **variables)
        return text, encode(tokenizer, text)

    low, high, best = 1, len(content), None
    while low <= high:
        middle = (low + high) // 2
        trial = attempt(middle)
        if len(trial[1]) <= max_tokens:
            best, low = trial, middle + 1
        else:
            high = middle - 1
    return best
