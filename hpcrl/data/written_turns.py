"""Writes a model's turn, whose reasoning is within <think> and </think> (hpcrl.data.reasoning), as a message from which
supervised training gets the text that the model wrote, with its family's own marks."""

from __future__ import annotations

import logging
from typing import Any

from hpcrl.data.answers import turns_of
from hpcrl.data.chat import MARK, encode, end_of_turn
from hpcrl.data.messages import THOUGHTS, one_turn
from hpcrl.data.reasoning import ASKED, CLOSE, OPEN, SAID, THOUGHT, TurnTexts
from hpcrl.data.rows import Row
from hpcrl.data.template_forms import TemplateRefusal

logger = logging.getLogger(__name__)

WHOLE, OPENED = "content", "content without its first mark"
FORMS = (WHOLE, *THOUGHTS, OPENED)
"""Where a turn's reasoning is written: in the content, under a key of its own, or in the content after <think>, with
which the prompt ends."""


class WrittenTurns:
    """Messages of a tokenizer's model. `form` is the first of FORMS in which the chat template shows a turn's reasoning
    as the model writes it; `content` if none does."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._texts = tokenizer, TurnTexts(tokenizer)
        found = next(filter(self._is_faithful, FORMS), None)
        self.form, self._warns = found or WHOLE, found is None

    def message(self, text: str) -> dict[str, Any]:
        """The assistant turn with this text. The first reasoning that the template shows in no form is logged."""
        if self._warns and text.startswith(OPEN):
            self._warns = False
            logger.warning(
                "the chat template shows reasoning in no form that training could learn as the model writes it; rows "
                "have it in the content, between <think> and </think>"
            )
        return _as_message(text, self.form)

    def _is_faithful(self, form: str) -> bool:
        """Whether a turn, written in this form and rendered as in training, is read back as it was."""
        text = f"{OPEN}\n{THOUGHT}\n{CLOSE}\n\n{SAID}"
        asked = [{"role": "user", "content": ASKED}]
        row = Row(messages=asked, answer=None, turn=_as_message(text, form), tools=None, domain="", extra={})
        try:
            *before, (learned, _) = turns_of(self._tokenizer, row)
        except (TemplateRefusal, ValueError):
            return False
        marks = self._texts.marks
        if MARK in learned or (marks and OPEN in learned and OPEN not in marks):
            return False  # a mark that is a token would be spelt in letters, or is another family's
        asked_text = "".join(piece for piece, _ in before)
        if any(asked_text.rstrip().endswith(mark) and learned.lstrip().startswith(mark) for mark in marks):
            return False  # the prompt has begun the reasoning
        learned = learned.removesuffix(end_of_turn(self._tokenizer) or self._tokenizer.eos_token)
        ids = encode(self._tokenizer, learned, begins=False)
        [found] = self._texts.of([ids], [encode(self._tokenizer, asked_text)])
        return "".join(found.split()) == "".join(text.split())


def _as_message(text: str, form: str) -> dict[str, Any]:
    if form == WHOLE or not text.startswith(OPEN):
        return one_turn(text)
    if form == OPENED:
        return one_turn(text.removeprefix(OPEN).removeprefix("\n"))
    thought, closed, said = text.removeprefix(OPEN).partition(CLOSE)
    return {**one_turn(said.lstrip("\n")), form: thought.strip("\n")} if closed else one_turn(text)
