"""Stop strings: the decoded last tokens are searched, only after a token that can complete a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

UNDECODED = "\ufffd"  # written by tokenizers for bytes of an incomplete character


class StopStrings:
    """Finds stop strings in growing responses, with a Hugging Face tokenizer. Special tokens count as text."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._pieces: list[str] | None = None
        self._closers: dict[tuple[str, ...], np.ndarray] = {}

    def closers(self, stop: tuple[str, ...]) -> np.ndarray:
        """bool [vocab]: tokens that may complete a stop string, since their text contains a string's last character."""
        if stop not in self._closers:
            if self._pieces is None:
                # Each token is decoded twice in a row, since some tokenizers strip the space before the first token.
                ids = range(min(len(self._tokenizer), self._vocab_size))
                self._pieces = [self._decode((i, i)) for i in ids]
            mask = np.zeros(self._vocab_size, dtype=bool)
            ends = {text[-1] for text in stop} | {UNDECODED}
            mask[: len(self._pieces)] = [not ends.isdisjoint(piece) for piece in self._pieces]
            self._closers[stop] = mask
        return self._closers[stop]

    def window(self, stop: tuple[str, ...]) -> int:
        """Number of last tokens to search: one per byte of the longest string, and a few more in case the first tokens
        are decoded differently without the tokens before them."""
        return max(len(text.encode()) for text in stop) + 4

    def completes(self, stop: tuple[str, ...], tail: Sequence[int]) -> bool:
        """Whether a stop string is in the text of `tail`, which had none before its last token."""
        text = self._decode(tail)
        return any(s in text for s in stop)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
