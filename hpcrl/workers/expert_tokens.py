"""The tokens of a turn that an environment's expert writes in the policy's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcrl.data.chat import encode, end_of_turn, marked
from hpcrl.data.reasoning import TAIL_TOKENS, TurnTexts


class ExpertTokens:
    """Encodes turns as supervised training does (hpcrl.data.answers): the text, then the token that ends a turn."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._marks = tokenizer, TurnTexts(tokenizer).marks
        self._end = end_of_turn(tokenizer) or tokenizer.eos_token or ""

    def of(self, text: str, before: Sequence[int]) -> np.ndarray:
        """int32 [n]: the tokens of a turn with this text after the tokens `before`, none for an empty text. If the
        prompt has begun the reasoning (<think> at its end), the turn first ends it."""
        if not text:
            return np.empty(0, dtype=np.int32)
        tail = self._tokenizer.decode(list(before[-TAIL_TOKENS:]), skip_special_tokens=False).rstrip()
        close = next((f"\n{end}\n\n" for begin, end in self._marks.items() if tail.endswith(begin)), "")
        written = f"{close}{marked(self._tokenizer, text)}{self._end}"
        return np.array(encode(self._tokenizer, written, begins=False), dtype=np.int32)
