"""From messages to token ids, through the tokenizer's chat template where it has one."""

from __future__ import annotations

from typing import Any

from hpcrl.data.rows import Messages


def render(tokenizer: Any, messages: Messages, tools: list[dict[str, Any]] | None, ask: bool = True) -> str:
    """The text of messages; with `ask` it ends where the answer of the model starts.

    Without a chat template: the contents, one paragraph each.
    """
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=ask)
    return "\n\n".join(message["content"] or "" for message in messages)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a rendered text. A template writes its own special tokens; without one the tokenizer adds them."""
    templated = bool(getattr(tokenizer, "chat_template", None))
    return list(tokenizer(text, add_special_tokens=not templated)["input_ids"])


def cut_to_fit(
    tokenizer: Any, messages: Messages, tools: list[dict[str, Any]] | None, max_tokens: int
) -> tuple[str, list[int]] | None:
    """(text, token ids) with the head of the last message cut so that at most `max_tokens` remain.

    The template and all other messages stay whole, and so does the end of the last message, where questions stand.
    None when they alone are too long.
    """
    content = messages[-1]["content"]

    def attempt(kept: int) -> tuple[str, list[int]]:
        last = {**messages[-1], "content": content[len(content) - kept :]}
        text = render(tokenizer, [*messages[:-1], last], tools)
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
