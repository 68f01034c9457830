"""The tokens of a turn that an environment's expert writes in the policy's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcrl.data.chat import CONTENT, encode, end_of_turn, marked, render
from hpcrl.data.reasoning import TAIL_TOKENS, TurnTexts
from hpcrl.data.template_forms import TemplateRefusal


class ExpertTokens:
    """Encodes turns as supervised training does a row's last answer (hpcrl.data.answers): the text, with what the chat
    template writes around it, such as gpt-oss' channel, then the token that ends a turn."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._marks = tokenizer, TurnTexts(tokenizer).marks
        self._end = end_of_turn(tokenizer) or tokenizer.eos_token or ""
        prompt, self._before, self._after = _around(tokenizer, self._end)
        self._asked = self._last_mark(prompt)

    def of(self, text: str, before: Sequence[int]) -> np.ndarray:
        """int32 [n]: the tokens of a turn with this text after the tokens `before`, none for an empty text. If the
        prompt has begun the reasoning (<think> at its end), the turn first ends it."""
        if not text:
            return np.empty(0, dtype=np.int32)
        mark = self._last_mark(self._tokenizer.decode(list(before[-TAIL_TOKENS:]), skip_special_tokens=False))
        if mark == self._asked and self._before is not None:
            begins = self._before
        else:  # the template writes another prompt before an answer than before a generated one
            begins = f"\n{self._marks[mark]}\n\n" if mark in self._marks else ""
        written = f"{begins}{marked(self._tokenizer, text)}{self._after}{self._end}"
        return np.array(encode(self._tokenizer, written, begins=False), dtype=np.int32)

    def _last_mark(self, prompt: str) -> str:
        """The mark of reasoning, which begins or ends it, at the end of a prompt; empty if there is none."""
        return next((mark for mark in (*self._marks, *self._marks.values()) if prompt.rstrip().endswith(mark)), "")


def _around(tokenizer: Any, end: str) -> tuple[str, str | None, str]:
    """A prompt; what the chat template writes between it and an answer, None if it rewrites the prompt; and what it
    writes between the answer and `end`."""
    if not getattr(tokenizer, "chat_template", None):
        return "", "", ""
    asked, answer = {"role": "user", "content": "0"}, {"role": "assistant", "content": CONTENT}
    try:
        prompt, whole = render(tokenizer, [asked], None), render(tokenizer, [asked, answer], None, ask=False)
    except TemplateRefusal:  # then no episode can begin either
        return "", None, ""
    before, found, after = whole.removeprefix(prompt).partition(CONTENT)
    if not whole.startswith(prompt) or not found:
        return prompt, None, ""
    between, ends, _ = after.partition(end)
    return prompt, before, between if ends else ""
