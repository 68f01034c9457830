"""Rows that are longer than the model's context, or than data.max_sequence_tokens: what is cut of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrl.config import DataConfig
from hpcrl.data.files import BadRow
from hpcrl.models.shape import decoder_keys, wrong_size
from hpcrl.spec.media import Medium

Tokenized = tuple[list[int], list[bool], tuple[Medium, ...]]
"""Token ids, loss mask, and images of a sequence."""


class TooLong(BadRow):
    """A row that is left out because of its length."""


@dataclass(frozen=True)
class LengthLimit:
    """The longest sequence that is trained on.

    Args:
        max_tokens: None: unlimited.
        key: What sets it.
    """

    max_tokens: int | None
    key: str

    @staticmethod
    def of(config: DataConfig, model: Path | None) -> LengthLimit:
        """The limit of a run with the model in this folder."""
        if config.max_sequence_tokens is not None or model is None:
            return LengthLimit(config.max_sequence_tokens, f"data.max_sequence_tokens={config.max_sequence_tokens}")
        limit = context_of(model)
        return LengthLimit(limit, f"the model's context of {limit}")

    def fit(self, sequences: Sequence[Tokenized], mode: str, where: str) -> tuple[list[Tokenized], int]:
        """The sequences of a row, and the number of tokens cut from them. TooLong if the row is to be left out,
        ValueError for mode error.

        Args:
            mode: data.overlong_sequences.
            where: Place of the row.
        """
        longest = max((len(ids) for ids, _, _ in sequences), default=0)
        limit = self.max_tokens
        if limit is None or longest <= limit:
            return list(sequences), 0
        text = f"{where}: the row has {longest} tokens with its answer, more than {self.key}"
        if mode == "error":
            raise ValueError(f"{text}; raise it, or set data.overlong_sequences=drop, keep_start or keep_end")
        if mode == "drop":
            raise TooLong(text)
        cut = _ends_cut(sequences, limit) if mode == "keep_start" else _beginnings_cut(sequences, longest - limit)
        if isinstance(cut, str):
            raise TooLong(f"{text}, and {cut} (data.overlong_sequences={mode})")
        before, after = (sum(len(ids) for ids, _, _ in each) for each in (sequences, cut))
        return cut, before - after


def _ends_cut(sequences: Sequence[Tokenized], limit: int) -> list[Tokenized] | str:
    """The first `limit` tokens of each sequence, without an image that is cut in two; why the row is of no use then."""
    found = []
    for ids, mask, media in sequences:
        end = min([limit, *(m.start for m in media if m.start < limit < m.start + m.length)])
        if not any(mask[:end]):
            return "nothing of its answer would be left"
        found.append((ids[:end], mask[:end], tuple(m for m in media if m.start + m.length <= end)))
    return found


def _beginnings_cut(sequences: Sequence[Tokenized], count: int) -> list[Tokenized] | str:
    """Each sequence without its first `count` tokens; why this cannot be done."""
    if any(media for _, _, media in sequences):
        return "the beginning of a prompt with images is not cut"
    if any(count >= mask.index(True) for _, mask, _ in sequences):  # one token of the prompt is before the answer
        return "its answer is too long without the prompt"
    return [(ids[count:], mask[count:], ()) for ids, mask, _ in sequences]


def context_of(model: Path) -> int | None:
    """Maximum positions of the model in a folder in HF layout; None if its config.json does not say."""
    try:
        found = json.loads((model / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    value = decoder_keys(found).get("max_position_embeddings") if isinstance(found, dict) else None
    return None if value is None or wrong_size("max_position_embeddings", value) else int(value)
